"""The programs: where they are, what is put in place, how they are started, and every line that is changed."""

# ruff: noqa: E501  (commands and sentences as they are)

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.programs_list import data

ON_CPUS = tuple((re.compile(old), new) for old, new in (
    (r"""(['"])nccl\1""", r"\1gloo\1"),
    (r"""(?<!== )f?(['"])cuda(:(\d+|\{[^}]*\}))?\1(?! in )""", r"\1cpu\1"),
    (r"\.cuda\([^()]*\)", ""),
    (r"assert torch\.cuda\.is_available\(\).*", "pass"),
    (r"torch\.cuda\.(set_device|synchronize|empty_cache)\((?:[^()]|\([^()]*\))*\)", "None"),
    (r"torch\.cuda\.device_count\(\)", "2"),
    (r"device_ids=\[[^\]]*\]", "device_ids=None"),
))  # fmt: skip
"""What a program that is written for CUDA needs on CPUs, in the files that ``Program.on_cpus`` names."""

VISION = ("torchvision",)


def nothing(root: Path) -> None:
    """Place no data, for a program that makes its own."""


@dataclass(frozen=True)
class Program:
    """A public training program.

    Args:
        name: What the page calls it.
        repository: OWNER/NAME on GitHub.
        commit: In full.
        script: The program, from the root of the repository.
        arguments: Of the program.
        place: Writes the data, below the folder in which the program runs.
        folder: Where it runs, from the root.
        on_cpus: Files in which CUDA is replaced by ``ON_CPUS``.
        edits: Further changes without which it does not run here: file, old, new.
        prepare: Changes that bring ``lockstep.prepare`` into a program for one device; also says that it is one.
        packages: What it imports that Lockstep's environment lacks, without what these need themselves.
        paths: What is taken of a large repository; empty: all.
        environment: Variables.
        adopts: For ``verify``, ``lockstep.adopt()`` is its first line: torch's own classes do not run it on CPUs.
        note: What a reader of its row must know.
    """

    name: str
    repository: str
    commit: str
    script: str
    arguments: str
    place: Callable[[Path], None] = nothing
    folder: str = ""
    on_cpus: tuple[str, ...] = ()
    edits: tuple[tuple[str, str, str], ...] = ()
    prepare: tuple[tuple[str, str, str], ...] = ()
    packages: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    adopts: bool = False
    note: str = ""


EXAMPLES = ("pytorch/examples", "77f55b912142e11fcfdf5b530231fb9c52f181e8")
PROGRAMS = (
    Program(
        "nanoGPT", "karpathy/nanoGPT", "3adf61e154c3fe3fca428ad6bc3818b27a3b8291", "train.py",
        "--dataset=tiny --device=cpu --backend=gloo --compile=False --dtype=float32 --max_iters=8 --eval_interval=4 "
        "--eval_iters=2 --n_layer=2 --n_head=2 --n_embd=32 --block_size=32 --batch_size=4 "
        "--gradient_accumulation_steps=4 --learning_rate=1e-2 --warmup_iters=2",
        data.tokens, on_cpus=("train.py",),
    ),
    Program(
        "minGPT, chargpt", "karpathy/minGPT", "37baab71b9abea1b76ab957409a1cc2fbfba8a26", "projects/chargpt/chargpt.py",
        "--model.model_type=gpt-nano --data.block_size=16 --trainer.max_iters=8 --trainer.batch_size=8 "
        "--trainer.num_workers=0 --model.embd_pdrop=0.0 --model.resid_pdrop=0.0 --model.attn_pdrop=0.0",
        data.characters, note="dropout off",
        prepare=(
            ("mingpt/trainer.py", "import torch\n", "import lockstep\nimport torch\n"),
            ("mingpt/trainer.py", "        model.train()\n        self.iter_num",
             "        model, train_loader = lockstep.prepare(model, train_loader)\n        model.train()\n"
             "        self.iter_num"),
        ),
    ),
    Program(
        "pytorch/examples: mnist", *EXAMPLES, "mnist/main.py", "--epochs 2 --batch-size 8 --no-accel --log-interval 1",
        data.digits, "mnist", packages=VISION, paths=("mnist",), note="dropout off",
        edits=(
            ("mnist/main.py", "Dropout(0.25)", "Dropout(0.0)"),
            ("mnist/main.py", "Dropout(0.5)", "Dropout(0.0)"),
        ),
        prepare=(
            ("mnist/main.py", "import argparse\n", "import argparse\nimport lockstep\n"),
            ("mnist/main.py", "    scheduler = StepLR",
             "    model, train_loader, test_loader = lockstep.prepare(model, train_loader, test_loader)\n"
             "    scheduler = StepLR"),
        ),
    ),
    Program(
        "pytorch/examples: ddp-tutorial-series", *EXAMPLES, "distributed/ddp-tutorial-series/multigpu_torchrun.py",
        "2 1 --batch_size 256", folder="distributed/ddp-tutorial-series", paths=("distributed/ddp-tutorial-series",),
        note="its loss is 0: cross-entropy over one class",
        on_cpus=("distributed/ddp-tutorial-series/multigpu_torchrun.py",),
        edits=(
            ("distributed/ddp-tutorial-series/multigpu_torchrun.py", ".to(self.gpu_id)", '.to("cpu")'),
        ),
    ),
    Program(
        "VICReg", "facebookresearch/vicreg", "4e12602fd495af83efd1631fbe82523e6db092e0", "main_vicreg.py",
        "--data-dir tiny --arch resnet34 --mlp 32-32-32 --epochs 2 --batch-size 4 --num-workers 0 --device cpu",
        data.pictures, packages=VISION, on_cpus=("main_vicreg.py", "distributed.py"), adopts=True,
        note="torch refuses SyncBatchNorm on CPUs",
    ),
    Program(
        "timm", "huggingface/pytorch-image-models", "aa4b5850c1543fa488abf260f18390eda46cf85d", "train.py",
        "--data-dir tiny --model test_vit --img-size 64 --batch-size 2 --epochs 2 --warmup-epochs 0 --workers 1 "
        "--device cpu --no-prefetcher --num-classes 2 --opt adamw --log-interval 1",
        data.pictures, packages=VISION, paths=("train.py", "timm"),
        edits=(
            ("train.py", "device_ids=[device]", "device_ids=None"),
        ),
    ),
    Program(
        "open_clip", "mlfoundations/open_clip", "89fb801f1e6087880e951fc8354b8a2077b79c6d",
        "src/open_clip_train/main.py",
        "--dataset-type synthetic --train-data none --train-num-samples 8 --model ViT-S-32-alt --batch-size 2 --epochs 1 "
        "--workers 0 --device cpu --dist-backend gloo --precision fp32 --warmup 1 --log-every-n-steps 1",
        packages=(*VISION, "timm", "ftfy", "regex", "wcwidth", "webdataset", "braceexpand"), paths=("src",),
        note="its synthetic samples are all alike",
        edits=(
            ("src/open_clip_train/main.py", "device_ids=[device]", "device_ids=None"),
        ),
    ),
    Program(
        "pytorch/examples: vae", *EXAMPLES, "vae/main.py", "--epochs 1 --batch-size 8 --no-accel --log-interval 1",
        data.digits, "vae", packages=VISION, paths=("vae",), note="sums its loss, draws noise in forward",
        prepare=(
            ("vae/main.py", "import argparse\n", "import argparse\nimport lockstep\n"),
            ("vae/main.py", "optimizer = optim.Adam(model.parameters(), lr=1e-3)\n",
             "optimizer = optim.Adam(model.parameters(), lr=1e-3)\n"
             "model, train_loader = lockstep.prepare(model, train_loader)\n"),
            ("vae/main.py", "model.decode(", "model.module.decode("),
        ),
    ),
    Program(
        "pytorch/examples: vae, mended", *EXAMPLES, "vae/main.py",
        "--epochs 1 --batch-size 8 --no-accel --log-interval 1",
        data.digits, "vae", packages=VISION, paths=("vae",),
        note="the sum times the number of ranks, and each rank its rows of the whole batch's noise",
        edits=(
            ("vae/main.py", "eps = torch.randn_like(std)", "eps = torch.randn(len(std), 20, generator=noise)"),
            ("vae/main.py", "class VAE(", "noise = torch.Generator()\nclass VAE("),
        ),
        prepare=(
            ("vae/main.py", "import argparse\n", "import argparse\nimport lockstep\n"),
            ("vae/main.py", "optimizer = optim.Adam(model.parameters(), lr=1e-3)\n",
             "optimizer = optim.Adam(model.parameters(), lr=1e-3)\n"
             "model, train_loader = lockstep.prepare(model, train_loader)\n"
             "world = torch.distributed.get_world_size()\n"),
            ("vae/main.py", "model.decode(", "model.module.decode("),
            ("vae/main.py", "        loss.backward()", "        (loss * world).backward()"),
            ("vae/main.py", "torch.randn(len(std), 20, generator=noise)",
             "torch.randn(world * len(std), 20, generator=noise).chunk(world)[torch.distributed.get_rank()]"),
        ),
    ),
    Program(
        "DiT", "facebookresearch/DiT", "ed81ce2229091fd4ecc9a223645f95cf379d582b", "train.py",
        "--data-path tiny/train --model DiT-S/8 --num-classes 2 --epochs 2 --global-batch-size 4 --num-workers 0 "
        "--log-every 1 --ckpt-every 1000",
        data.pictures, packages=(*VISION, "timm", "diffusers", "regex", "importlib_metadata", "zipp"), on_cpus=("train.py",), note="with a random encoder, another on each rank",
        edits=(
            ("train.py", "device = rank % 2", 'device = "cpu"'),
            ("train.py", 'AutoencoderKL.from_pretrained(f"stabilityai/sd-vae-ft-{args.vae}")',
             'AutoencoderKL(down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4, '
             "block_out_channels=(4,) * 4, norm_num_groups=2)"),
        ),
    ),
    Program(
        "MAE", "facebookresearch/mae", "efb2a8062c206524e35e47d04501ed4f544c0ae8", "main_pretrain.py",
        "--data_path tiny --model mae_vit_base_patch16 --batch_size 2 --epochs 2 --warmup_epochs 0 --num_workers 0 "
        "--device cpu --mask_ratio 0.9 --lr 1e-3 --output_dir=",
        data.pictures, packages=(*VISION, "timm"), on_cpus=("util/misc.py", "main_pretrain.py", "engine_pretrain.py"),
        note="a newer timm",
        edits=(
            ("main_pretrain.py", 'assert timm.__version__ == "0.3.2"', 'assert timm.__version__'),
            ("main_pretrain.py", "optim_factory.add_weight_decay", "optim_factory.param_groups_weight_decay"),
            ("models_mae.py", "qk_scale=None, ", ""),
            ("util/misc.py", "from torch._six import inf", "from math import inf"),
            ("util/pos_embed.py", "np.float)", "float)"),
        ),
    ),
    Program(
        "DINO", "facebookresearch/dino", "7c446df5b9f45747937fb0d72314eb9f7b66930a", "main_dino.py",
        "--arch vit_tiny --data_path tiny/train --out_dim 256 --batch_size_per_gpu 2 --epochs 2 --warmup_epochs 0 "
        "--local_crops_number 2 --num_workers 0 --use_fp16 false --freeze_last_layer 0 --warmup_teacher_temp_epochs 0",
        data.pictures, packages=VISION, on_cpus=("utils.py", "main_dino.py"),
        paths=("main_dino.py", "utils.py", "vision_transformer.py"),
        edits=(
            ("main_dino.py", ' + torch.hub.list("facebookresearch/xcit:main")', ""),
        ),
    ),
    Program(
        "HiFi-GAN", "jik876/hifi-gan", "4769534d45265d52a904b850da5a622601885777", "train.py",
        "--config tiny/config.json --input_wavs_dir tiny --input_training_file tiny/train.txt "
        "--input_validation_file tiny/valid.txt --training_epochs 1 --validation_interval 100 --stdout_interval 1",
        data.sounds, note="its data set draws segments at random: on several ranks by sample",
        packages=("librosa", "soundfile", "audioread", "lazy_loader", "pooch", "soxr", "numba", "llvmlite", "decorator",
                  "msgpack", "matplotlib", "contourpy", "cycler", "fonttools", "kiwisolver", "pyparsing"),
        edits=(
            ("train.py", "torch.device('cuda:{:d}'.format(rank))", "torch.device('cpu')"),
            ("meldataset.py", "librosa_mel_fn(sampling_rate, n_fft, num_mels, fmin, fmax)",
             "librosa_mel_fn(sr=sampling_rate, n_fft=n_fft, n_mels=num_mels, fmin=fmin, fmax=fmax)"),
            ("meldataset.py", "spec = torch.stft(", "spec = torch.view_as_real(torch.stft("),
            ("meldataset.py", "onesided=True)", "onesided=True, return_complex=True))"),
        ),
        prepare=(
            ("train.py", "import itertools\n", "import itertools\nimport lockstep\n"),
            ("train.py", "    generator.train()\n    mpd.train()\n    msd.train()\n    for",
             "    generator, mpd, msd, train_loader = lockstep.prepare(generator, mpd, msd, train_loader)\n"
             "    generator.train()\n    mpd.train()\n    msd.train()\n    for"),
        ),
    ),
    Program(
        "pytorch/examples: ddp", *EXAMPLES, "distributed/ddp/example.py", "", paths=("distributed/ddp",),
        folder="distributed/ddp",
        edits=(
            ("distributed/ddp/example.py", "if not verify_min_gpu_count", "if False and not verify_min_gpu_count"),
            ("distributed/ddp/example.py", ".to(rank)", '.to("cpu")'),
            ("distributed/ddp/example.py", "device_ids=[rank]", "device_ids=None"),
            ("distributed/ddp/example.py", "torch.distributed.get_default_backend_for_device(acc)", '"gloo"'),
            ("distributed/ddp/example.py", "        torch.accelerator.set_device_index(rank)\n", ""),
        ),
    ),
    Program(
        "pytorch/examples: minGPT-ddp", *EXAMPLES, "distributed/minGPT-ddp/mingpt/main.py",
        "data_config.path=input.txt data_config.block_size=16 data_config.truncate=1.0 gpt_config.n_layer=2 "
        "gpt_config.n_head=2 gpt_config.n_embd=16 trainer_config.max_epochs=1 trainer_config.batch_size=128 "
        "trainer_config.data_loader_workers=0 trainer_config.use_amp=False hydra.output_subdir=null",
        data.short_text, "distributed/minGPT-ddp/mingpt", paths=("distributed/minGPT-ddp",),
        packages=("hydra-core", "omegaconf", "antlr4-python3-runtime==4.9.3"),
        edits=(
            ("distributed/minGPT-ddp/mingpt/main.py", "if not verify_min_gpu_count",
             "if False and not verify_min_gpu_count"),
            ("distributed/minGPT-ddp/mingpt/main.py", 'torch.device(f"{acc}:{rank}")', 'torch.device("cpu")'),
            ("distributed/minGPT-ddp/mingpt/main.py", "    torch.accelerator.set_device_index(rank)\n", ""),
            ("distributed/minGPT-ddp/mingpt/trainer.py", "import boto3\n", ""),
            ("distributed/minGPT-ddp/mingpt/trainer.py", 'torch.device(f"{self.acc}:{self.local_rank}")',
             'torch.device("cpu")'),
            ("distributed/minGPT-ddp/mingpt/trainer.py", "device_ids=[self.local_rank]", "device_ids=None"),
            ("distributed/minGPT-ddp/mingpt/trainer.py", ".to(self.local_rank)", '.to("cpu")'),
        ),
    ),
    Program(
        "pytorch/examples: imagenet", *EXAMPLES, "imagenet/main.py",
        "tiny --arch resnet18 --epochs 2 --batch-size 2 --workers 0 --no-accel --dist-url env:// --dist-backend gloo "
        "--print-freq 1",
        data.pictures, "imagenet", packages=VISION, paths=("imagenet",),
        edits=(
            ("imagenet/main.py", "        print('using CPU, this will be slow')",
             "        model = torch.nn.parallel.DistributedDataParallel(model) if args.distributed else model"),
        ),
    ),
    Program(
        "Barlow Twins", "facebookresearch/barlowtwins", "8e8d284ca0bc02f88b92328e53f9b901e86b4a3c", "main.py",
        "tiny --epochs 2 --batch-size 4 --workers 0 --projector 32-32-32 --print-freq 1",
        data.pictures, packages=VISION, on_cpus=("main.py",), note="SyncBatchNorm off",
        edits=(
            ("main.py", "torch.multiprocessing.spawn(main_worker, (args,), args.ngpus_per_node)",
             'main_worker(int(os.environ["RANK"]), args)'),
            ("main.py", "ngpus_per_node = 2", 'ngpus_per_node = int(os.environ["WORLD_SIZE"])'),
            ("main.py", "    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)\n", ""),
            ("main.py", "'tcp://localhost:58472'", "'env://'"),
        ),
    ),
    Program(
        "torchtnt: mnist", "pytorch/tnt", "b83990d2e1c32ea78e49f5d464516abc26db1848", "examples/mnist/main.py",
        "--batch-size 4 --max-epochs 1 --max-train-steps-per-epoch 16", data.digits, "examples/mnist",
        packages=(*VISION, "torcheval", "pyre_extensions", "typing_inspect", "tabulate", "lazy-importer"),
        paths=("examples", "torchtnt"),
        edits=(
            ("torchtnt/utils/version.py", "import pkg_resources\n", ""),
        ),
    ),
    Program(
        "improved-diffusion", "openai/improved-diffusion", "1bc7bbbdc414d83d4abf2ad8cc1446dc36c4e4d5",
        "scripts/image_train.py",
        "--data_dir tiny/train --image_size 32 --num_channels 32 --num_res_blocks 1 --batch_size 2 --microbatch 1 "
        "--lr_anneal_steps 4 --log_interval 1",
        data.pictures,
        packages=("blobfile", "pycryptodomex", "lxml"),
        edits=(
            ("improved_diffusion/dist_util.py", "from mpi4py import MPI\n", ""),
            ("improved_diffusion/dist_util.py", "    comm = MPI.COMM_WORLD\n",
             '    return dist.init_process_group("gloo")\n'),
            ("improved_diffusion/image_datasets.py", "from mpi4py import MPI\n", "import torch.distributed as dist\n"),
            ("improved_diffusion/image_datasets.py", "MPI.COMM_WORLD.Get_rank()", "dist.get_rank()"),
            ("improved_diffusion/image_datasets.py", "MPI.COMM_WORLD.Get_size()", "dist.get_world_size()"),
            ("improved_diffusion/train_util.py", "        if th.cuda.is_available():\n            self.use_ddp",
             "        if True:\n            self.use_ddp"),
            ("improved_diffusion/train_util.py", "=[dist_util.dev()]", "=None"),
            ("improved_diffusion/train_util.py", "output_device=dist_util.dev()", "output_device=None"),
        ),
    ),
    Program(
        "diffusers: train_unconditional", "huggingface/diffusers", "58eb52c0803ea9af3abec60841c2a093bdf1f951",
        "examples/unconditional_image_generation/train_unconditional.py",
        "--train_data_dir tiny/train --model_config_name_or_path tiny/unet --resolution 16 --train_batch_size 2 "
        "--num_epochs 2 --gradient_accumulation_steps 2 --lr_warmup_steps 1 --output_dir out --ddpm_num_steps 10 "
        "--ddpm_num_inference_steps 2 --eval_batch_size 1 --use_ema",
        data.pictures_and_unet, packages=(*VISION, "accelerate", "regex", "importlib_metadata", "zipp"),
        environment=(("ACCELERATE_USE_CPU", "true"),), paths=("src", "examples/unconditional_image_generation"),
        note="with Accelerate",
    ),
    Program(
        "cleanrl: ppo_atari_multigpu", "vwxyzjn/cleanrl", "fe8d8a03c41a7ef5b523e2e354bd01c363e786bb",
        "cleanrl/ppo_atari_multigpu.py",
        "--total-timesteps 128 --local-num-envs 2 --num-steps 16 --update-epochs 2 --num-minibatches 2 --no-cuda",
        packages=("gymnasium", "ale-py", "tyro", "shtab", "docstring_parser", "typeguard", "farama-notifications",
                  "opencv-python-headless", "importlib_resources"),
        paths=("cleanrl", "cleanrl_utils"), note="averages its gradients by all_reduce",
        edits=(
            ("cleanrl/ppo_atari_multigpu.py", "import gymnasium as gym\n", "import ale_py\nimport gymnasium as gym\n"),
            ("cleanrl/ppo_atari_multigpu.py", "GrayScaleObservation", "GrayscaleObservation"),
            ("cleanrl/ppo_atari_multigpu.py", "wrappers.FrameStack(", "wrappers.FrameStackObservation("),
        ),
    ),
    Program(
        "pytorch/examples: siamese_network", *EXAMPLES, "siamese_network/main.py",
        "--epochs 1 --batch-size 8 --no-accel --log-interval 1",
        data.digits, "siamese_network", packages=VISION, paths=("siamese_network",),
        note="its data set draws pairs at random, on several ranks by sample",
        prepare=(
            ("siamese_network/main.py", "import argparse, ", "import lockstep, argparse, "),
            ("siamese_network/main.py", "    scheduler = StepLR",
             "    model, train_loader = lockstep.prepare(model, train_loader)\n"
             "    scheduler = StepLR"),
        ),
    ),
    Program(
        "pytorch/examples: mnist_rnn", *EXAMPLES, "mnist_rnn/main.py", "--epochs 2 --batch-size 8 --log-interval 1",
        data.digits, "mnist_rnn", packages=VISION, paths=("mnist_rnn",), note="dropout off",
        edits=(
            ("mnist_rnn/main.py", "Dropout2d(0.25)", "Dropout2d(0.0)"),
            ("mnist_rnn/main.py", "Dropout2d(0.5)", "Dropout2d(0.0)"),
        ),
        prepare=(
            ("mnist_rnn/main.py", "import argparse\n", "import argparse\nimport lockstep\n"),
            ("mnist_rnn/main.py", "    scheduler = StepLR",
             "    model, train_loader, test_loader = lockstep.prepare(model, train_loader, test_loader)\n"
             "    scheduler = StepLR"),
        ),
    ),
    Program(
        "pytorch/examples: word_language_model", *EXAMPLES, "word_language_model/main.py",
        "--data tiny --epochs 1 --emsize 16 --nhid 16 --batch_size 8 --bptt 20 --dropout 0 --lr 0.01 --use-optimizer "
        "--log-interval 1",
        data.words, "word_language_model",
        paths=tuple(f"word_language_model/{name}.py" for name in ("main", "data", "model")),
        note="dropout off; it has no loader: each rank takes its columns",
        prepare=(
            ("word_language_model/main.py", "import argparse\n", "import argparse\nimport lockstep\n"),
            ("word_language_model/main.py", "criterion = nn.NLLLoss()\n",
             "criterion = nn.NLLLoss()\nmodel = lockstep.prepare(model)\n"
             "rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()\n"
             "train_data = train_data.chunk(world, 1)[rank].contiguous()\n"
             "args.batch_size //= world\n"),
            ("word_language_model/main.py", "model.init_hidden", "model.module.init_hidden"),
            ("word_language_model/main.py", "torch.save(model, f)", "torch.save(model.module, f)"),
            ("word_language_model/main.py", "model = torch.load(f)", "model = lockstep.prepare(torch.load(f))"),
            ("word_language_model/main.py", "model.rnn.flatten", "model.module.rnn.flatten"),
        ),
    ),
    Program(
        "EDM", "NVlabs/edm", "008a4e5316c8e3bfe61a62f874bddba254295afb", "train.py",
        "--outdir out --data tiny/train --arch ddpmpp --cbase 8 --cres 1 --duration 0.001 --batch 256 --batch-gpu 32 "
        "--augment 0 --dropout 0 --cache 0 --tick 1 --seed 0",
        data.small_pictures, on_cpus=("train.py", "training/training_loop.py", "torch_utils/distributed.py"),
        packages=("psutil", "click"), note="reads a stream of samples, accumulates 4 micro-batches of each rank",
        edits=(
            ("torch_utils/distributed.py", "    torch.cuda.set_device(int(os.environ.get('LOCAL_RANK', '0')))\n", ""),
            ("torch_utils/misc.py", "super().__init__(dataset)", "super().__init__()"),
            ("training/training_loop.py", "torch.cuda.max_memory_allocated(device)", "0"),
            ("training/training_loop.py", "torch.cuda.max_memory_reserved(device)", "0"),
            ("training/training_loop.py", "        torch.cuda.reset_peak_memory_stats()\n", ""),
        ),
    ),
    Program(
        "yolov5", "ultralytics/yolov5", "5081342f04fb287fc2e5f2b5a4e06752b7937b1c", "train.py",
        "--weights= --cfg tiny/model.yaml --data tiny/data.yaml --hyp data/hyps/hyp.scratch-low.yaml --imgsz 64 "
        "--batch-size 4 --epochs 2 --workers 0 --device cpu --noplots --noautoanchor --nosave --project out",
        data.boxes, packages=(*VISION, "ultralytics", "ultralytics-thop", "psutil", "opencv-python-headless", "seaborn",
                              "matplotlib", "contourpy", "cycler", "fonttools", "kiwisolver", "pyparsing"),
        note="multiplies its loss by the number of ranks; evaluates without NMS",
        environment=(("YOLO_OFFLINE", "true"), ("YOLO_CONFIG_DIR", "tiny"), ("YOLOV5_CONFIG_DIR", "tiny/Ultralytics"), ("YOLOv5_AUTOINSTALL", "false")),
        edits=(
            ("train.py", "    if cuda and RANK != -1:\n        model = smart_DDP", "    if RANK != -1:\n        model = smart_DDP"),
            ("train.py", '        assert torch.cuda.device_count() > LOCAL_RANK, "insufficient CUDA devices for DDP command"\n'
             '        torch.cuda.set_device(LOCAL_RANK)\n        device = torch.device("cuda", LOCAL_RANK)\n', ""),
            ("train.py", '"nccl" if dist.is_nccl_available() else "gloo"', '"gloo"'),
            ("train.py", '        check_requirements(ROOT / "requirements.txt")\n', ""),
            ("utils/general.py", "torchvision.ops.nms(boxes, scores, iou_thres)", "scores.argsort(descending=True)"),
            ("utils/torch_utils.py", "device_ids=[LOCAL_RANK], output_device=LOCAL_RANK, ", ""),
        ),
    ),
    Program(
        "nanochat", "karpathy/nanochat", "92d63d4e8bb4df75c3b71618f31ddde2378b2bcd", "scripts/base_train.py",
        "--device-type=cpu --depth=2 --aspect-ratio=16 --head-dim=16 --max-seq-len=32 --device-batch-size=2 "
        "--total-batch-size=256 --num-iterations=4 --warmup-steps=1 --window-pattern=L --eval-every=-1 "
        "--core-metric-every=-1 --sample-every=-1",
        data.parquet, packages=("rustbpe", "tiktoken", "regex"),
        paths=("nanochat", "scripts", "tasks"),
        note="no wrapper: its optimizer (Muon, AdamW) averages and divides the parameters; not compiled",
        environment=(("NANOCHAT_BASE_DIR", "tiny"), ("TORCHDYNAMO_DISABLE", "1")),
        edits=(
            ("scripts/base_train.py", "import wandb\n", ""),
            ("nanochat/optim.py", ".get_future()", ""),
            ("nanochat/common.py", 'if is_ddp_requested and device_type == "cuda":\n        device = torch.device("cuda", ddp_local_rank)\n'
             '        torch.cuda.set_device(device)  # make "cuda" default to this device\n'
             '        dist.init_process_group(backend="nccl", device_id=device)\n',
             'if is_ddp_requested:\n        device = torch.device("cpu")\n        dist.init_process_group(backend="gloo")\n'),
        ),
    ),
    Program(
        "pytorch/examples: dcgan", *EXAMPLES, "dcgan/main.py",
        "--dataset folder --dataroot tiny/train --niter 2 --batchSize 4 --workers 0 --nz 8 --ngf 4 --ndf 4 --manualSeed 1",
        data.pictures, "dcgan", packages=VISION, paths=("dcgan",),
        note="its loop draws the noise: on several ranks other noise",
        prepare=(
            ("dcgan/main.py", "import argparse\n", "import argparse\nimport lockstep\n"),
            ("dcgan/main.py", "if opt.dry_run:\n    opt.niter = 1\n",
             "if opt.dry_run:\n    opt.niter = 1\n"
             "netD, netG, dataloader = lockstep.prepare(netD, netG, dataloader)\n"),
        ),
    ),
    Program(
        "pytorch/examples: dcgan, mended", *EXAMPLES, "dcgan/main.py",
        "--dataset folder --dataroot tiny/train --niter 2 --batchSize 4 --workers 0 --nz 8 --ngf 4 --ndf 4 --manualSeed 1",
        data.pictures, "dcgan", packages=VISION, paths=("dcgan",),
        note="each rank its rows of the whole batch's noise",
        edits=(
            ("dcgan/main.py", "noise = torch.randn(batch_size, nz, 1, 1, device=device)",
             "noise = torch.randn(batch_size, nz, 1, 1, generator=drawn)"),
            ("dcgan/main.py", "criterion = nn.BCELoss()\n", "criterion = nn.BCELoss()\ndrawn = torch.Generator()\n"),
        ),
        prepare=(
            ("dcgan/main.py", "import argparse\n", "import argparse\nimport lockstep\n"),
            ("dcgan/main.py", "if opt.dry_run:\n    opt.niter = 1\n",
             "if opt.dry_run:\n    opt.niter = 1\n"
             "netD, netG, dataloader = lockstep.prepare(netD, netG, dataloader)\n"
             "world = torch.distributed.get_world_size()\n"),
            ("dcgan/main.py", "torch.randn(batch_size, nz, 1, 1, generator=drawn)",
             "torch.randn(world * batch_size, nz, 1, 1, generator=drawn).chunk(world)[torch.distributed.get_rank()]"),
        ),
    ),
    Program(
        "pytorch/examples: super_resolution", *EXAMPLES, "super_resolution/main.py",
        "--upscale_factor 4 --batchSize 3 --testBatchSize 2 --nEpochs 2 --threads 0", data.textures, "super_resolution",
        packages=VISION, paths=("super_resolution",), note="the last batch of each epoch is smaller",
        prepare=(
            ("super_resolution/main.py", "import argparse\n", "import argparse\nimport lockstep\n"),
            ("super_resolution/main.py", "optimizer = optim.Adam(model.parameters(), lr=opt.lr)\n",
             "optimizer = optim.Adam(model.parameters(), lr=opt.lr)\n"
             "model, optimizer, training_data_loader, testing_data_loader = lockstep.prepare(\n"
             "    model, optimizer, training_data_loader, testing_data_loader)\n"),
        ),
    ),
    Program(
        "pytorch/examples: time_sequence_prediction", *EXAMPLES, "time_sequence_prediction/train.py", "--steps 2",
        data.waves, "time_sequence_prediction", paths=("time_sequence_prediction",),
        packages=("matplotlib", "contourpy", "cycler", "fonttools", "kiwisolver", "pyparsing"),
        note="LBFGS, float64; it has no loader: each rank takes its rows",
        edits=(
            ("time_sequence_prediction/train.py", "torch.load('traindata.pt')", "torch.load('traindata.pt', weights_only=False)"),
        ),
        prepare=(
            ("time_sequence_prediction/train.py", "import argparse\n", "import argparse\nimport lockstep\n"),
            ("time_sequence_prediction/train.py", "    #begin to train\n",
             "    seq, optimizer = lockstep.prepare(seq, optimizer)\n"
             "    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()\n"
             "    input, target = input.chunk(world)[rank], target.chunk(world)[rank]\n    #begin to train\n"),
        ),
    ),
    Program(
        "pytorch/examples: actor_critic", *EXAMPLES, "reinforcement_learning/actor_critic.py", "", folder="reinforcement_learning",
        paths=("reinforcement_learning",), packages=("gymnasium", "farama-notifications"),
        note="each rank plays an episode of its own, so an update takes 2",
        edits=(
            ("reinforcement_learning/actor_critic.py", "in count(1):", "in range(1, 7):"),
        ),
        prepare=(
            ("reinforcement_learning/actor_critic.py", "import argparse\n", "import argparse\nimport lockstep\n"),
            ("reinforcement_learning/actor_critic.py", "optimizer = optim.Adam(model.parameters(), lr=3e-2)\n",
             "optimizer = optim.Adam(model.parameters(), lr=3e-2)\nmodel, optimizer = lockstep.prepare(model, optimizer)\n"),
            ("reinforcement_learning/actor_critic.py", "model.saved_actions", "model.module.saved_actions"),
            ("reinforcement_learning/actor_critic.py", "model.rewards", "model.module.rewards"),
        ),
    ),
)  # fmt: skip

NOT_RUN = {
    "SwAV": "needs NVIDIA's apex",
    "sentence-transformers": "its commit needs transformers 4, which needs an older tokenizers than the environment's",
    "PyTorch Geometric": "its examples for several devices need OGB, torch-sparse or pyg-lib, and downloads",
    "Composer, custom_models": "reads its data from a folder at the root of the machine",
    "StyleGAN2-ADA, torchtnt's auto_unit_example": "start their own ranks",
    "mmengine, speechbrain": "no row in the table yet; mmengine's example downloads CIFAR-10, speechbrain's need torchaudio",
    "fairseq": "its setup.py wants hydra-core below 1.1 and omegaconf below 2.1, older than those of the other programs",
    "Transformers' examples": "a snapshot of the repository has 1.3 GB; lockstep's examples/with_trainer.py runs the Trainer",
    "pytorch/examples: gcn, fast_neural_style, language_translation": "download data, weights or vocabularies; gcn trains on one graph, which ranks cannot divide",
}
"""Programs that were asked for, and why they have no runs."""
