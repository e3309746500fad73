"""Records, which users share, are kept without secrets."""

from lockstep.base.record_files import hide_secrets


def test_command_lines_are_kept_without_secrets():
    command = [
        *("train.py", "--api-key", "k1", "HF_TOKEN=t1", "--lr", "0.1", "--tokenizer", "gpt2", "--max-tokens", "5"),
        *("--author", "ada", "--password=p 1", "AWS_SECRET_ACCESS_KEY=s1", "--log", "postgres://user:pw1@host/db"),
    ]
    assert hide_secrets(command) == (
        "train.py --api-key HIDDEN HF_TOKEN=HIDDEN --lr 0.1 --tokenizer gpt2 --max-tokens 5 --author ada "
        "--password=HIDDEN AWS_SECRET_ACCESS_KEY=HIDDEN --log postgres://HIDDEN@host/db"
    )
