"""A training script, read by its syntax tree and never run: do all ranks do together what they must do together?"""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from lockstep.errors import ConfigurationError
from lockstep.study.doctor.findings import HANG, WRONG, NotChecked, Problem, check

_WRAPPERS = ("DistributedDataParallel", "DDP")
# Packages that wrap models and loaders themselves.
_MANAGERS = {"accelerate", "lightning", "pytorch_lightning", "deepspeed", "composer", "ray", "ignite"}

_COLLECTIVES = {
    *("all_reduce", "all_gather", "all_gather_object", "all_gather_into_tensor", "broadcast", "broadcast_object_list"),
    *("barrier", "monitored_barrier", "reduce", "reduce_scatter", "reduce_scatter_tensor", "gather", "gather_object"),
    *("scatter", "scatter_object_list", "all_to_all", "all_to_all_single", "new_group"),
}
_COLLECTIVE_MODULES = ("torch.distributed.", "dist.", "distributed.", "c10d.")
_COLLECTIVE_NAMES = ("lockstep.save", "lockstep.load", "torch.distributed.checkpoint.save", "world.barrier")
_SAVES = ("torch.save", "safetensors.torch.save_file", "safetensors.torch.save_model")
# Calls from function to function that are followed.
_DEPTH = 4

_RANK = re.compile(
    r"(^|_)rank(_?0|_zero(_only|_first)?|_id)?$|(main|master)_process|(process|global)_zero"
    r"|^(is|am)_(main|master|chief|primary|root|leader)$",
    re.IGNORECASE,
)
_OTHER_RANK = re.compile(r"(lora|low|full|matrix|max|min|svd|adapter|tensor|page|item|doc)_rank$", re.IGNORECASE)
# Names of loaders and data sets that every rank may go through as a whole.
_EVALUATION = re.compile(r"(?<![a-z])(val(?!ue)|test|eval|dev(?!ice)|infer|predict)|train=False", re.IGNORECASE)
# Comparisons of the rank, as text, that hold on all ranks or on none: is there more than one?
_IS_DISTRIBUTED = re.compile(r"[!=]= -1$|> -1$|>= 0$|\bis (not )?None$|\bin os\.environ$")
_IS_PLAIN = "it has no DistributedDataParallel and no init_process_group, here in this file"
_LEAVES = (ast.Return, ast.Continue, ast.Break)  # not `raise`: that is how arguments are checked


class Script:
    """One file, parsed, with the full names of what it calls.

    Args:
        text: Its source.
        path: As the user named it.

    Raises:
        SyntaxError: It is no Python.
    """

    def __init__(self, text: str, path: str) -> None:
        self.path = path
        self.has_streams = "IterableDataset" in text or "WebDataset" in text
        self.nodes = list(ast.walk(ast.parse(text, path)))
        self._parents = {child: node for node in self.nodes for child in ast.iter_child_nodes(node)}
        self._imported: dict[str, str] = {}
        for node in self.nodes:
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
                for alias in node.names:
                    # `import a.b` binds the name a, `import a.b as c` the whole.
                    name = alias.name if module or alias.asname else alias.name.partition(".")[0]
                    self._imported[alias.asname or name] = module + name
        self.calls = [(self.name(node.func), node) for node in self.nodes if isinstance(node, ast.Call)]
        self.calls.sort(key=lambda item: (item[1].lineno, item[1].col_offset))
        functions = [node for node in self.nodes if isinstance(node, ast.FunctionDef)]
        counts = Counter(function.name for function in functions)
        # Those that share a name are left out, as a call does not show which is meant.
        self._functions = {one.name: one for one in functions if counts[one.name] == 1}
        self._assignments = [node for node in self.nodes if isinstance(node, ast.Assign)]
        # Names that conditions on the rank are assigned to, such as `is_zero = rank == 0`.
        self._flags: set[str] = set()
        for node in self._assignments:
            if isinstance(node.value, ast.Compare) and self._differs_by_rank(node.value):
                self._flags |= {name.rpartition(".")[2] for name in self._targets(node)}

        self.uses_task = any(name in ("lockstep.Task", "lockstep.train.task.Task") for name, _ in self.calls)
        starts = self.calls_of(*_WRAPPERS, "init_process_group", "fully_shard")
        starts += [call for name, call in self.calls if name in ("lockstep.init", "lockstep.launch")]
        managers = sorted(_MANAGERS & {name.partition(".")[0] for name in self._imported.values()})
        self.is_distributed = bool(starts) and not managers
        self.not_checked: list[NotChecked] = []
        if managers or not (starts or self.uses_task):
            because = f"{', '.join(managers)} takes care of them" if managers else _IS_PLAIN
            self.not_checked.append(NotChecked("samplers and collectives of the script", because))
        workers = [keywords(call).get("num_workers", "") for call in self.calls_of("DataLoader")]
        # The largest number of loader processes that is written in it.
        self.num_workers = max((int(text) for text in workers if text.isdecimal()), default=None)

    def name(self, node: ast.AST) -> str:
        """Return the full name of a dotted expression, such as ``torch.nn.Linear`` for ``nn.Linear``."""
        first, dot, rest = ast.unparse(node).partition(".")
        return self._imported.get(first, first) + dot + rest

    def where(self, node: ast.expr) -> str:
        """Return ``FILE:LINE``."""
        return f"{self.path}:{node.lineno}"

    def calls_of(self, *last_names: str) -> list[ast.Call]:
        """Return the calls of what is named so, wherever it comes from."""
        return [call for name, call in self.calls if name.rpartition(".")[2] in last_names]

    def _targets(self, statement: ast.AST) -> list[str]:
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        return [self.name(part) for one in targets for part in (one.elts if isinstance(one, ast.Tuple) else [one])]

    def assigned_to(self, call: ast.AST) -> list[str]:
        """Return the names that the statement with ``call`` assigns to, such as ``self.loader``."""
        return self._targets(next(one for one in self.ancestors(call) if isinstance(one, ast.stmt)))

    def sources(self, node: ast.expr) -> list[ast.expr]:
        """Return an expression and, if it is a name, what is assigned to that anywhere."""
        name = self.name(node)
        return [node, *(one.value for one in self._assignments if name in self._targets(one))]

    def knows_rank(self, node: ast.expr) -> bool:
        """Return whether the rank is in an expression, or in what is assigned to it."""
        return any(is_rank(name) for source in self.sources(node) for name in names(source))

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the parent of ``node``, the parent of that, and so on, up to the module."""
        while node in self._parents:
            node = self._parents[node]
            yield node

    def function_around(self, node: ast.AST) -> ast.FunctionDef | None:
        """Return the function that ``node`` runs in; ``None`` for the module."""
        return next((one for one in self.ancestors(node) if isinstance(one, ast.FunctionDef)), None)

    def function_of(self, call: ast.Call) -> ast.FunctionDef | None:
        """Return the function of this file that is called, if it is one; methods of whatever object."""
        name = self.name(call.func)
        is_imported = name.partition(".")[0] in self._imported.values()
        return None if is_imported else self._functions.get(name.rpartition(".")[2])

    # Where it depends on the rank.

    def _differs_by_rank(self, test: ast.expr) -> bool:
        """Return whether ranks may differ in ``test``; not so if it asks whether there are ranks at all."""
        if isinstance(test, ast.BoolOp):
            return any(map(self._differs_by_rank, test.values))
        if isinstance(test, ast.UnaryOp):
            return self._differs_by_rank(test.operand)
        text = ast.unparse(test)
        is_question = _IS_DISTRIBUTED.search(text) if isinstance(test, ast.Compare) else "env" in text
        return not is_question and any(name in self._flags or is_rank(name) for name in names(test))

    def guards(self, node: ast.AST) -> list[str]:
        """Return the conditions on the rank that lead to ``node`` within its function, innermost first."""
        found: list[str] = []
        child = node
        for parent in self.ancestors(node):
            tests: list[tuple[ast.expr, str]] = []
            if isinstance(parent, ast.If) and child is not parent.test:
                tests.append((parent.test, "{}" if child in parent.body else "not ({})"))
            block = getattr(parent, "body", None)
            if isinstance(block, list) and child in block:  # `if rank != 0: return` before it
                before = [one for one in block[: block.index(child)] if isinstance(one, ast.If)]
                tests += [(one.test, "not ({})") for one in before if isinstance(one.body[-1], _LEAVES)]
            found += [form.format(ast.unparse(test)) for test, form in tests if self._differs_by_rank(test)]
            # What surrounds the definition of a function does not guard its calls: `is_guarded` follows those.
            if isinstance(parent, (ast.FunctionDef, ast.Lambda)):
                break
            child = parent
        return found

    def is_guarded(self, node: ast.AST, depth: int = _DEPTH) -> bool:
        """Return whether only some ranks come to ``node``, by its own conditions or those of all callers."""
        if self.guards(node):
            return True
        function = self.function_around(node)
        if function is None or depth == 0:
            return False
        decorators = [name for one in function.decorator_list for name in names(one)]
        if any(map(is_rank, (function.name, *decorators))):
            return True  # such as @rank_zero_only
        # A function that nobody in this file calls may be called by anybody.
        callers = [call for _, call in self.calls if self.function_of(call) is function]
        return bool(callers) and all(self.is_guarded(call, depth - 1) for call in callers)

    def collective_in(self, call: ast.Call, depth: int = _DEPTH) -> ast.Call | None:
        """Return the call if it is a collective, or else the first one that the called function of this file makes."""
        name = self.name(call.func)
        is_method = name.rpartition(".")[2] in _COLLECTIVES and name.startswith(_COLLECTIVE_MODULES)
        if is_method or name in _COLLECTIVE_NAMES:
            return call
        function = self.function_of(call)
        if function is None or depth == 0:
            return None
        inner = [one for _, one in self.calls if self.function_around(one) is function]
        return next(filter(None, (self.collective_in(one, depth - 1) for one in inner)), None)


def read_script(spec: str) -> Script:
    """Return the file of ``FILE.py`` or ``FILE.py:NAME``, parsed.

    Raises:
        ConfigurationError: There is no such file, or it is no Python; names the line.
    """
    path = path_of(spec)
    try:
        return Script(path.read_text(encoding="utf-8"), str(path))
    except SyntaxError as error:
        line = (error.text or "").strip()
        raise ConfigurationError(f"{path}, line {error.lineno}: SyntaxError: {error.msg}\n    {line}") from None
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}\nName a Python file, or leave it out.") from None


def path_of(spec: str) -> Path:
    """Return the file in ``FILE.py`` or ``FILE.py:NAME``."""
    file, colon, _ = spec.rpartition(":")
    return Path(file if colon and file.endswith(".py") else spec)


def argument(call: ast.Call, keyword: str, position: int) -> ast.expr | None:
    """Return an argument by keyword or position, if it is given."""
    given = {one.arg: one.value for one in call.keywords}
    return given.get(keyword, call.args[position] if position < len(call.args) else None)


def keywords(call: ast.Call) -> dict[str | None, str]:
    """Return the arguments that are given by keyword, as text; under ``None`` those that ``**`` hides."""
    return {given.arg: ast.unparse(given.value) for given in call.keywords}


def names(node: ast.AST) -> set[str]:
    """Return the names and attributes in an expression, and texts in capitals, such as those of variables."""
    found: set[str] = set()
    for part in ast.walk(node):
        match part:
            case ast.Name(id=name) | ast.Attribute(attr=name):
                found.add(name)
            case ast.Constant(value=str(text)) if text.isupper():
                found.add(text)
    return found


def is_rank(name: str) -> bool:
    """Return whether a name is that of a process's rank."""
    return bool(_RANK.search(name)) and not _OTHER_RANK.search(name)


# Data.


def _is_for_evaluation(facts: Script, call: ast.Call, dataset: ast.expr) -> bool:
    function = facts.function_around(call)
    texts = [*facts.assigned_to(call), *map(ast.unparse, facts.sources(dataset)), function.name if function else ""]
    return any(map(_EVALUATION.search, texts))


@check(Script)
def sampler_missing(facts: Script) -> Iterator[Problem]:
    """A ``DataLoader`` for training in a script with several ranks has no sampler that knows of ranks.

    Left out are loaders whose names show that they are for validation or tests, data sets that are made with the rank,
    and files with streams.

    Cost: All ranks go through the whole data set: as much work as all devices can do, for the progress of one.
    Fix: Give the loader a DistributedSampler, which shuffles, too.
    """
    for call in facts.calls_of("DataLoader") if facts.is_distributed and not facts.has_streams else ():
        dataset = argument(call, "dataset", 0)
        given = keywords(call)
        if dataset is None or any(given.get(name, "None") != "None" for name in ("sampler", "batch_sampler", None)):
            continue
        if facts.is_guarded(call) or facts.knows_rank(dataset) or _is_for_evaluation(facts, call, dataset):
            continue
        paste = (
            "sampler = lockstep.DistributedSampler(dataset)\n"
            "loader = DataLoader(dataset, batch_size=..., sampler=sampler)  # without shuffle"
        )
        found = f"DataLoader of {ast.unparse(dataset)} has no sampler that knows of ranks."
        yield Problem(WRONG, found, paste, facts.where(call))


@check(Script)
def set_epoch_missing(facts: Script) -> Iterator[Problem]:
    """Torch's ``DistributedSampler`` shuffles by seed and epoch; if it is not set, each epoch has the same order.

    lockstep's own counts epochs by itself.

    Cost: Every epoch has the same order of samples and the same batches.
    Fix: Set the sampler's epoch, or use lockstep.DistributedSampler, which moves on by itself.
    """
    if not facts.is_distributed or facts.calls_of("set_epoch"):
        return
    for call in facts.calls_of("DistributedSampler"):
        dataset = argument(call, "dataset", 0)
        given, is_ours = keywords(call), facts.name(call.func).startswith("lockstep.")
        if dataset is None or is_ours or None in given or given.get("shuffle") == "False":
            continue
        if _is_for_evaluation(facts, call, dataset):
            continue
        name = next(iter(facts.assigned_to(call)), "sampler")
        found = f"{name} is a DistributedSampler that shuffles, and nothing calls set_epoch."
        yield Problem(WRONG, found, f"{name}.set_epoch(epoch)  # first line of the loop over epochs", facts.where(call))


# What all ranks must do together, or only one may do.


@check(Script)
def saves_on_all_ranks(facts: Script) -> Iterator[Problem]:
    """``torch.save`` on every rank to a path that does not have the rank in it.

    Conditions on the rank count, also those of the callers and early returns.

    Cost: All ranks write the same file at the same time: what lies there afterwards may be damaged.
    Fix: Save on rank zero only, or with lockstep.save, which all ranks call and one writes whole.
    """
    for name, call in facts.calls if facts.is_distributed else ():
        path = argument(call, "f", 1) or argument(call, "filename", 1)
        if name not in _SAVES or path is None or facts.is_guarded(call):
            continue
        if not facts.knows_rank(path):
            found = f"{ast.unparse(call.func)} writes {ast.unparse(path)} on every rank."
            yield Problem(WRONG, found, f"if dist.get_rank() == 0:\n    {ast.unparse(call)}", facts.where(call))


@check(Script)
def collective_on_one_rank(facts: Script) -> Iterator[Problem]:
    """A collective that only ranks with a certain condition come to, directly or through functions of the same file.

    A barrier that the other ranks make behind the opposite condition is none: that is how one goes first.

    Cost: They wait for the others until time is up, 10 to 30 minutes; or it meets another collective and mixes data.
    Fix: Let all ranks come to it, and only print or save on one.
    """
    for name, call in facts.calls if facts.is_distributed else ():
        guards = facts.guards(call)
        reached = facts.collective_in(call) if guards else None
        if reached is None:
            continue
        function = facts.function_around(call)
        alike = [other for other_name, other in facts.calls if other_name == name and facts.guards(other)]
        here = [other for other in alike if facts.function_around(other) is function]
        # In pairs each side of a condition makes one, as where one rank goes first; of an odd number one is left over.
        if len(here) % 2 == 0 or call is not here[-1]:
            continue
        way = "" if reached is call else f", by way of {ast.unparse(call.func)}() in line {call.lineno}"
        found = f"{ast.unparse(reached.func)} is for all ranks, but only those with `{guards[0]}` come to it{way}."
        paste = f"{ast.unparse(reached)}  # on every rank, outside of `{guards[0]}`"
        yield Problem(HANG, found, paste, facts.where(reached))
