"""A training script, read by its syntax tree and never run: do all ranks do together what they must do together?"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from lockstep.errors import ConfigurationError
from lockstep.study.doctor.findings import HANG, NOTE, WRONG, Facts, NotChecked, Problem, check

_SECTION = "Scripts"
_MANAGERS = ("accelerate", "lightning", "pytorch_lightning", "deepspeed", "composer", "ray", "ignite")
"""Packages that wrap models and loaders themselves."""

_WRAPPERS = ("DistributedDataParallel", "DDP")
_STARTERS = ("lockstep.init", "lockstep.comm.world.init", "lockstep.launch")
_COLLECTIVES = {
    *("all_reduce", "all_gather", "all_gather_object", "all_gather_into_tensor", "broadcast", "broadcast_object_list"),
    *("barrier", "monitored_barrier", "reduce", "reduce_scatter", "reduce_scatter_tensor", "gather", "gather_object"),
    *("scatter", "scatter_object_list", "all_to_all", "all_to_all_single", "new_group"),
}
_OF_COLLECTIVES = ("torch.distributed.", "dist.", "distributed.", "c10d.")
_WHOLE_NAMES = ("lockstep.save", "lockstep.load", "torch.distributed.checkpoint.save", "world.barrier")
_DEPTH = 4
"""Calls from function to function that are followed."""

_RANK = re.compile(
    r"(^|_)rank(_?0|_zero(_only|_first)?|_id)?$|main_process|master_process|process_zero|global_zero"
    r"|^(is|am)_(main|master|chief|primary|root|leader)$",
    re.IGNORECASE,
)
_OTHER_RANK = re.compile(r"(lora|low|full|matrix|max|min|svd|adapter|tensor|page|item|doc)_rank$", re.IGNORECASE)
_INDEX = {"gpu_id", "gpu", "process_index", "device_id", "local_process_index"}
"""Names that stand for a rank where they are compared with a number."""

_ASKS_FOR_RANKS = {"distributed", "is_distributed", "ddp", "is_ddp", "world_size", "WORLD_SIZE"}
"""Names in a condition that tell a run on several ranks from one on a single device."""

_EVALUATION = re.compile(r"(^|_)(val|valid|validation|test|testing|eval|evaluation|dev|infer|predict)", re.IGNORECASE)
_WITH_BUFFERS = re.compile(r"^(Lazy|Sync)?BatchNorm([123]d)?$|resn?e[xt]|densenet|mobilenet|efficientnet|_bn$")

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Guard:
    """A condition that only some ranks pass; ``branch`` is True for what runs where it holds."""

    test: ast.expr
    branch: bool

    def describe(self) -> str:
        """Return the condition as it is written, with ``not`` in front for the other branch."""
        text = ast.unparse(self.test)
        return text if self.branch else f"not ({text})"


class Script(Facts):
    """One file, parsed, with the full names of what it calls.

    Args:
        text: Its source.
        path: As the user named it.
        num_ranks: It is to run on.

    Raises:
        SyntaxError: It is no Python.
    """

    section, topic = _SECTION, "script"

    def __init__(self, text: str, path: str, num_ranks: int = 2) -> None:
        self.path, self.num_ranks = path, num_ranks
        self.tree = ast.parse(text, path)
        self.nodes = list(ast.walk(self.tree))
        self._parents = {child: node for node in self.nodes for child in ast.iter_child_nodes(node)}
        self._imported: dict[str, str] = {}
        for node in self.nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    first = alias.name.partition(".")[0]
                    self._imported[alias.asname or first] = alias.name if alias.asname else first
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                for alias in node.names:
                    self._imported[alias.asname or alias.name] = f"{node.module}.{alias.name}"

    # Names and calls.

    def where(self, node: ast.expr | ast.stmt) -> str:
        """Return ``FILE:LINE``."""
        return f"{self.path}:{node.lineno}"

    def name(self, node: ast.AST) -> str:
        """Return the full name of a dotted expression, such as ``torch.nn.Linear`` for ``nn.Linear``."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        first = node.id if isinstance(node, ast.Name) else "?"  # the result of a call has no name
        return ".".join([self._imported.get(first, first), *reversed(parts)])

    @cached_property
    def calls(self) -> list[tuple[str, ast.Call]]:
        """All calls in the order of their lines, each with the full name of what is called."""
        found = [(self.name(node.func), node) for node in self.nodes if isinstance(node, ast.Call)]
        return sorted(found, key=lambda item: (item[1].lineno, item[1].col_offset))

    def calls_of(self, *last_names: str) -> list[ast.Call]:
        """Return the calls of what is named so, wherever it comes from."""
        return [call for name, call in self.calls if name.rpartition(".")[2] in last_names]

    def imports(self, package: str) -> bool:
        """Say whether the script imports ``package``, or from it."""
        return any(f"{name}.".startswith(f"{package}.") for name in self._imported.values())

    def targets(self, call: ast.AST) -> list[str]:
        """Return the names that the statement with ``call`` assigns to, such as ``self.loader``."""
        statement = next((one for one in [call, *self.ancestors(call)] if isinstance(one, ast.stmt)), None)
        return [self.name(part) for target in _targets_of(statement) for part in getattr(target, "elts", [target])]

    def values(self, name: str) -> list[ast.expr]:
        """Return what is assigned to ``name`` anywhere."""
        return [
            node.value
            for node in self.nodes
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None
            if any(self.name(target) == name for target in _targets_of(node))
        ]

    def sources(self, node: ast.expr | None) -> list[ast.expr]:
        """Return an expression and, if it is a name, what is assigned to that."""
        is_name = isinstance(node, (ast.Name, ast.Attribute))
        return [] if node is None else [node, *(self.values(self.name(node)) if is_name else [])]

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the parent of ``node``, the parent of that, and so on, up to the module."""
        while node in self._parents:
            node = self._parents[node]
            yield node

    def function_around(self, node: ast.AST) -> Function | None:
        """Return the function that ``node`` runs in; ``None`` for the module."""
        return next((one for one in self.ancestors(node) if isinstance(one, Function)), None)

    @cached_property
    def functions(self) -> dict[str, Function]:
        """The functions and methods by name; those that share a name are left out, as a call does not tell which."""
        found = [node for node in self.nodes if isinstance(node, Function)]
        names = [node.name for node in found]
        return {node.name: node for node in found if names.count(node.name) == 1}

    def function_of(self, call: ast.Call) -> Function | None:
        """Return the function of this file that is called, if it is one; methods of whatever object."""
        name = self.name(call.func)
        function = self.functions.get(name.rpartition(".")[2])
        if function is None or name.partition(".")[0] in self._imported.values():
            return None
        is_method = isinstance(self._parents[function], ast.ClassDef)
        return function if is_method == isinstance(call.func, ast.Attribute) else None

    # What kind of script it is.

    @cached_property
    def wrappings(self) -> list[ast.Call]:
        """The calls of DistributedDataParallel, torch's or ours, by whatever name it was imported."""
        return self.calls_of(*_WRAPPERS)

    @cached_property
    def starts_lockstep(self) -> bool:
        """Whether it calls ``lockstep.init``, which sets the device, or starts ranks by ``lockstep.launch``."""
        return any(name in _STARTERS for name, _ in self.calls)

    @cached_property
    def is_distributed(self) -> bool:
        """Whether it runs on several ranks."""
        return bool(self.wrappings or self.calls_of("init_process_group", "fully_shard")) or self.starts_lockstep

    @cached_property
    def manager(self) -> str | None:
        """The package that places the model and divides the data in this script's stead, if one does."""
        return next((name for name in _MANAGERS if self.imports(name)), None)

    @property
    def uses_task(self) -> bool:
        """Whether it makes a `lockstep.Task`."""
        return any(name in ("lockstep.Task", "lockstep.train.task.Task") for name, _ in self.calls)

    @property
    def most_workers(self) -> int | None:
        """The largest number of loader processes that is written in it; ``None`` if none is."""
        numbers = [constant(argument(call, "num_workers", 5)) for call in self.calls_of("DataLoader")]
        return max((number for number in numbers if isinstance(number, int)), default=None)

    def is_ours(self, call: ast.Call) -> bool:
        """Say whether lockstep's own is called."""
        return self.name(call.func).startswith("lockstep.")

    @property
    def summary(self) -> str:
        """What kind of script it is."""
        if self.uses_task:
            return f"{self.path} has a lockstep.Task"
        kind = f"leaves that to {self.manager}" if self.manager else "has one rank"
        if self.wrappings:
            ours = any(self.is_ours(call) for call in self.wrappings)
            kind = f"uses {'lockstep' if ours else 'torch'}'s DistributedDataParallel"
        elif self.is_distributed:
            kind = "starts ranks"
        return f"{self.path} {kind}; it was read, not run"

    @property
    def not_checked(self) -> list[NotChecked]:
        """What of a script cannot be told from its text."""
        if self.manager is not None:
            return [NotChecked("samplers and devices of the script", f"{self.manager} takes care of them")]
        if not self.is_distributed and not self.uses_task:
            because = "it has no DistributedDataParallel and no init_process_group, here in this file"
            return [NotChecked("samplers, devices and collectives of the script", because)]
        return []

    # Where it depends on the rank.

    @cached_property
    def _flags(self) -> set[str]:
        """Names that conditions on the rank are assigned to, such as ``is_zero = rank == 0``."""
        kinds = (ast.Compare, ast.BoolOp, ast.UnaryOp)
        found = [node for node in self.nodes if isinstance(node, ast.Assign) and isinstance(node.value, kinds)]
        flags = [node for node in found if _differs_by_rank(node.value, set())]
        return {self.name(target).rpartition(".")[2] for node in flags for target in node.targets}

    def guards(self, node: ast.AST) -> list[Guard]:
        """Return the conditions on the rank that lead to ``node`` within its function, innermost first."""
        found: list[Guard] = []
        child = node
        for parent in self.ancestors(node):
            tests: list[tuple[ast.expr, bool]] = []
            if isinstance(parent, (ast.If, ast.IfExp)) and child is not parent.test:
                body = parent.body if isinstance(parent, ast.If) else [parent.body]
                tests.append((parent.test, child in body))
            elif isinstance(parent, ast.BoolOp) and child in parent.values:
                is_and = isinstance(parent.op, ast.And)
                tests += [(test, is_and) for test in parent.values[: parent.values.index(child)]]
            for block in (getattr(parent, name, None) for name in ("body", "orelse", "finalbody")):
                if isinstance(block, list) and child in block:  # `if rank != 0: return` before it
                    before = [one for one in block[: block.index(child)] if isinstance(one, ast.If)]
                    tests += [(one.test, False) for one in before if _leaves(one.body[-1])]
            found += [Guard(test, branch) for test, branch in tests if _differs_by_rank(test, self._flags)]
            if isinstance(parent, (*_FUNCTIONS, ast.Lambda)):
                break
            child = parent
        return found

    def is_guarded(self, node: ast.AST, depth: int = _DEPTH) -> bool:
        """Say whether only some ranks come to ``node``, by its own conditions or those of all callers."""
        if self.guards(node):
            return True
        function = self.function_around(node)
        if function is None or depth == 0:
            return False
        decorators = [name for one in function.decorator_list for name in names(one)]
        if any(is_rank(name) for name in (function.name, *decorators)):
            return True  # such as @rank_zero_only
        callers = [call for _, call in self.calls if self.function_of(call) is function]
        return bool(callers) and all(self.is_guarded(call, depth - 1) for call in callers)

    def is_for_one(self, node: ast.AST) -> bool:
        """Say whether ``node`` runs only where the script has asked whether it is distributed, or for the rank."""
        child = node
        for parent in self.ancestors(node):
            if isinstance(parent, (ast.If, ast.IfExp)) and child is not parent.test:
                named = names(parent.test)
                is_absent = any(isinstance(part, (ast.Is, ast.IsNot)) for part in ast.walk(parent.test))
                if named & _ASKS_FOR_RANKS or any(map(is_rank, named)) or (is_absent and named & _INDEX):
                    return True
            child = parent
        return False


_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def read_script(spec: str, num_ranks: int) -> Script:
    """Return the file of ``FILE.py`` or ``FILE.py:NAME``, parsed.

    Raises:
        ConfigurationError: There is no such file, or it is no Python; names the line.
    """
    path = path_of(spec)
    if not path.is_file():
        kind = "is a folder" if path.is_dir() else "does not exist"
        nearby = Path(f"{path}.py")
        hint = f"Did you mean {nearby}?" if nearby.is_file() else "Name a Python file, or leave it out."
        raise ConfigurationError(f"{path} {kind}.\n{hint}")
    try:
        return Script(path.read_text(encoding="utf-8"), str(path), num_ranks)
    except SyntaxError as error:
        line = (error.text or "").strip()
        raise ConfigurationError(f"{path}, line {error.lineno}: SyntaxError: {error.msg}\n    {line}") from None
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}\nName a Python file.") from None


def path_of(spec: str) -> Path:
    """Return the file in ``FILE.py`` or ``FILE.py:NAME``."""
    file, colon, _ = spec.rpartition(":")
    return Path(file if colon and file.endswith(".py") else spec)


def argument(call: ast.Call, keyword: str, position: int | None = None) -> ast.expr | None:
    """Return an argument by keyword or position, if it is given."""
    for given in call.keywords:
        if given.arg == keyword:
            return given.value
    if position is not None and position < len(call.args) and not has_star(call):
        return call.args[position]
    return None


def has_star(call: ast.Call) -> bool:
    """Say whether arguments are passed that the syntax does not show."""
    stars = [given for given in call.args if isinstance(given, ast.Starred)]
    return bool(stars) or any(given.arg is None for given in call.keywords)


def constant(node: ast.expr | None) -> object:
    """Return the value of a literal; ``None`` for everything else."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = constant(node.operand)
        return -value if isinstance(value, (int, float)) else None
    return node.value if isinstance(node, ast.Constant) else None


def names(node: ast.AST) -> set[str]:
    """Return the names and attributes in an expression, and texts in capitals, such as those of variables."""
    found: set[str] = set()
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            found.add(part.id)
        elif isinstance(part, ast.Attribute):
            found.add(part.attr)
        elif isinstance(part, ast.Constant) and isinstance(part.value, str) and part.value.isupper():
            found.add(part.value)
    return found


def is_rank(name: str) -> bool:
    """Say whether a name is that of a process's rank."""
    return bool(_RANK.search(name)) and not _OTHER_RANK.search(name)


def _targets_of(statement: ast.AST | None) -> list[ast.expr]:
    if isinstance(statement, ast.Assign):
        return statement.targets
    return [statement.target] if isinstance(statement, ast.AnnAssign) else []


def _leaves(last: ast.stmt) -> bool:
    """Say whether a block that ends so leaves; not by raising: that is how arguments are checked."""
    if isinstance(last, ast.Expr) and isinstance(last.value, ast.Call):
        return ast.unparse(last.value.func).rpartition(".")[2] in ("exit", "_exit", "quit")
    return isinstance(last, (ast.Return, ast.Continue, ast.Break))


def _differs_by_rank(test: ast.expr, flags: set[str]) -> bool:
    """Say whether ranks may differ in what ``test`` is; not so for asking whether there are ranks at all."""
    if isinstance(test, ast.BoolOp):
        return any(_differs_by_rank(part, flags) for part in test.values)
    if isinstance(test, ast.UnaryOp):
        return _differs_by_rank(test.operand, flags)
    named = names(test)
    is_on_rank = bool(named & flags) or any(map(is_rank, named))
    if not isinstance(test, ast.Compare):
        return is_on_rank and not named & {"environ", "getenv"}  # is the variable set: is it a distributed run
    operator, right = test.ops[0], test.comparators[0]
    if isinstance(operator, (ast.In, ast.NotIn)):
        return isinstance(right, (ast.List, ast.Tuple, ast.Set)) and any(map(is_rank, names(test.left)))
    values = [constant(part) for part in (test.left, *test.comparators)]
    asks_for_being = isinstance(operator, (ast.Is, ast.IsNot)) or -1 in values
    if asks_for_being or (isinstance(operator, ast.GtE) and constant(right) == 0):
        return False  # rank != -1, rank is not None, rank >= 0: is it a distributed run
    return is_on_rank or bool(named & _INDEX and any(isinstance(value, int) for value in values))


# Data.


def _is_for_evaluation(facts: Script, call: ast.Call) -> bool:
    dataset = argument(call, "dataset", 0)
    sources = facts.sources(dataset)
    if any(isinstance(one, ast.Call) and constant(argument(one, "train")) is False for one in sources):
        return True
    function = facts.function_around(call)
    texts = [part.value for part in ast.walk(dataset or call) if isinstance(part, ast.Constant)]
    named = [*facts.targets(call), *(names(dataset) if dataset else ()), *(text for text in texts if text)]
    named += [function.name] if function is not None else []
    return any(_EVALUATION.search(part) for name in named for part in str(name).split("."))


def _is_divided(facts: Script, call: ast.Call) -> bool:
    """Say whether the data set is a rank's part already, or a stream, or unknown."""
    sources = facts.sources(argument(call, "dataset", 0))
    made = {name for source in sources for name in names(source)}
    classes = [node for node in facts.nodes if isinstance(node, ast.ClassDef) and node.name in made]
    made |= {name for one in classes for base in one.bases for name in names(base)}
    streams = any("Iterable" in name or "WebDataset" in name or "split_dataset" in name for name in made)
    return not sources or streams or any(map(is_rank, made))


@check(Script)
def sampler_missing(facts: Script) -> Iterator[Problem]:
    """A ``DataLoader`` for training in a script with several ranks has no sampler that knows of ranks.

    Nor is its data set divided otherwise. Loaders whose names say that they are for validation or tests are left out.

    Cost: All ranks go through the whole data set: as much work as all devices can do, for the progress of one.
    Fix: Give the loader a DistributedSampler, which shuffles, too.
    """
    if not facts.is_distributed or facts.manager is not None:
        return
    for call in facts.calls_of("DataLoader"):
        given = [argument(call, "sampler", 3), argument(call, "batch_sampler", 4)]
        has_sampler = any(value is not None and ast.unparse(value) != "None" for value in given)
        if has_star(call) or has_sampler or facts.is_guarded(call):
            continue
        if _is_for_evaluation(facts, call) or _is_divided(facts, call):
            continue
        shuffle = argument(call, "shuffle", 2)
        shuffles = shuffle is not None and constant(shuffle) is not False
        how = f"(shuffle={ast.unparse(shuffle)})" if shuffles and shuffle else ""
        paste = (
            "sampler = lockstep.DistributedSampler(dataset)\n"
            "loader = DataLoader(dataset, batch_size=..., sampler=sampler)  # without shuffle"
        )
        yield Problem(WRONG, f"DataLoader{how} has no sampler that knows of ranks.", paste, facts.where(call))


@check(Script)
def set_epoch_missing(facts: Script) -> Iterator[Problem]:
    """Torch's ``DistributedSampler`` shuffles by seed and epoch; if it is not set, each epoch has the same order.

    lockstep's own counts epochs by itself.

    Cost: Every epoch has the same order of samples and the same batches.
    Fix: Set the sampler's epoch, or use lockstep.DistributedSampler, which moves on by itself.
    """
    if not facts.is_distributed or facts.manager is not None or facts.calls_of("set_epoch"):
        return
    for call in facts.calls_of("DistributedSampler"):
        shuffles = constant(argument(call, "shuffle", 3)) is not False
        if not shuffles or facts.is_ours(call) or has_star(call) or _is_for_evaluation(facts, call):
            continue
        name = next(iter(facts.targets(call)), "sampler")
        if any(isinstance(one, ast.Call) for one in facts.ancestors(call)):
            name = f"{name}.sampler"  # made within the call of the loader that has the name
        found = f"{name} is a DistributedSampler that shuffles, and nothing calls set_epoch."
        paste = f"{name}.set_epoch(epoch)  # first line of the loop over epochs"
        yield Problem(WRONG, found, paste, facts.where(call))


# Devices.


def _short(call: ast.Call) -> str:
    text, name = ast.unparse(call), ast.unparse(call.func)
    return text if len(text) < 60 else f"{name}(...)" if len(name) < 60 else f"...{name.rpartition('.')[2]}()"


def _device_calls(facts: Script) -> Iterator[tuple[ast.Call, list[object]]]:
    """Yield the calls that may name a GPU, each with the literals that name it."""
    for name, call in facts.calls:
        last = name.rpartition(".")[2]
        if last in ("cuda", "to", "set_device", "set_device_index") or name == "torch.device":
            given = [*call.args, *(keyword.value for keyword in call.keywords)]
            branches = ([one.body, one.orelse] if isinstance(one, ast.IfExp) else [one] for one in given)
            parts = [part for branch in branches for part in branch]
            literals = [constant(part) for part in parts]
            is_index = last in ("cuda", "set_device", "set_device_index")
            yield call, [one for one in literals if isinstance(one, str) or (is_index and isinstance(one, int))]
        elif call in facts.wrappings:
            ids = argument(call, "device_ids", 1)
            numbers = [constant(item) for item in ids.elts] if isinstance(ids, ast.List) else []
            yield call, [one for one in numbers if isinstance(one, int)]


@check(Script)
def device_fixed(facts: Script) -> Iterator[Problem]:
    """A GPU's number is written in the script, in code that all ranks come to.

    Cost: All ranks use that one: it runs out of memory, and NCCL stops at a duplicate GPU or waits for ever.
    Fix: Take the number from the launcher.
    """
    if not facts.is_distributed or facts.manager is not None:
        return
    for call, literals in _device_calls(facts):
        if any(isinstance(one, int) or str(one).startswith("cuda:") for one in literals) and not facts.is_for_one(call):
            paste = 'device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))'
            yield Problem(HANG, f"{_short(call)} names the same GPU on every rank.", paste, facts.where(call))


@check(Script)
def device_not_set(facts: Script) -> Iterator[Problem]:
    """The script uses the current GPU, and nothing in it makes each rank's own the current one.

    ``.cuda()``, ``.to("cuda")`` and ``torch.device("cuda")`` mean the current GPU. Only reported where the ranks are
    set up in the same file.

    Cost: All ranks use GPU 0: it runs out of memory, and NCCL stops at a duplicate GPU or waits for ever.
    Fix: Choose the GPU first, or let lockstep.init() do it.
    """
    sets_up = facts.calls_of("init_process_group") and not facts.starts_lockstep and facts.manager is None
    sets_device = facts.calls_of("set_device", "set_device_index")
    chooses_visible = any("CUDA_VISIBLE_DEVICES" in names(node) for node in facts.nodes if isinstance(node, ast.Assign))
    if not sets_up or sets_device or chooses_visible:
        return
    for call, literals in _device_calls(facts):
        is_bare = facts.name(call.func).endswith("cuda") and not call.args and not call.keywords
        if (is_bare or "cuda" in literals) and not facts.is_for_one(call):
            found = f"{_short(call)} means the current GPU, and nothing makes each rank's own the current one."
            paste = 'torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))  # before anything uses CUDA'
            yield Problem(HANG, found, paste, facts.where(call))
            return


# What all ranks must do together, or only one may do.


@check(Script)
def saves_on_all_ranks(facts: Script) -> Iterator[Problem]:
    """``torch.save`` on every rank to a path that does not have the rank in it.

    Conditions on the rank count, also those of the callers and early returns.

    Cost: All ranks write the same file at the same time: what lies there afterwards may be damaged.
    Fix: Save on rank zero only, or with lockstep.save, which all ranks call and one writes whole.
    """
    if not facts.is_distributed:
        return
    for name, call in facts.calls:
        if name not in ("torch.save", "safetensors.torch.save_file", "safetensors.torch.save_model"):
            continue
        path = argument(call, "f", 1) or argument(call, "filename", 1)
        function = facts.function_around(call)
        is_used = function is None or any(
            isinstance(node, (ast.Name, ast.Attribute)) and facts.name(node).rpartition(".")[2] == function.name
            for node in facts.nodes
        )
        names_rank = any(is_rank(one) for source in facts.sources(path) for one in names(source))
        if is_used and not names_rank and not facts.is_guarded(call):
            found = f"{ast.unparse(call.func)} writes {ast.unparse(path) if path else 'the file'} on every rank."
            yield Problem(WRONG, found, f"if dist.get_rank() == 0:\n    {ast.unparse(call)}", facts.where(call))


def _is_collective(facts: Script, call: ast.Call) -> bool:
    name = facts.name(call.func)
    last = name.rpartition(".")[2]
    if name in _WHOLE_NAMES or last in ("consolidate_state_dict", "wait_for_everyone"):
        return True
    return last in _COLLECTIVES and name.startswith(_OF_COLLECTIVES)


def _calls_in(facts: Script, function: Function) -> list[ast.Call]:
    """Return the calls that run when ``function`` is called, in the order of their lines."""
    return [call for _, call in facts.calls if facts.function_around(call) is function]


def _collective_in(facts: Script, call: ast.Call, depth: int = _DEPTH) -> ast.Call | None:
    """Return the call if it is a collective, or else the first one that the called function of this file makes."""
    if _is_collective(facts, call):
        return call
    function = facts.function_of(call)
    if function is None or depth == 0:
        return None
    found = (_collective_in(facts, inner, depth - 1) for inner in _calls_in(facts, function))
    return next((one for one in found if one is not None), None)


@check(Script)
def collective_on_one_rank(facts: Script) -> Iterator[Problem]:
    """A collective that only ranks with a certain condition come to, directly or through functions of the same file.

    A barrier that the other ranks make behind the opposite condition is none: that is how one goes first.

    Cost: They wait for the others until time is up, 10 to 30 minutes; or it meets another collective and mixes data.
    Fix: Let all ranks come to it, and only print or save on one.
    """
    seen: set[ast.Call] = set()
    for name, call in facts.calls if facts.is_distributed else ():
        guards = facts.guards(call)
        reached = _collective_in(facts, call) if guards else None
        if reached is None or reached in seen:
            continue
        function = facts.function_around(call)
        alike = [other for other_name, other in facts.calls if other_name == name and facts.guards(other)]
        here = [other for other in alike if facts.function_around(other) is function]
        if len(here) % 2 == 0 or call is not here[-1]:
            continue  # in pairs: each side of the condition makes one
        seen.add(reached)
        way = "" if reached is call else f", by way of {ast.unparse(call.func)}() in line {call.lineno}"
        who = f"only those with `{guards[0].describe()}` come to it{way}"
        paste = f"{ast.unparse(reached)}  # on every rank, outside of `if {ast.unparse(guards[0].test)}:`"
        found = f"{ast.unparse(reached.func)} is for all ranks, but {who}."
        yield Problem(HANG, found, paste, facts.where(reached))


def _forward_of(facts: Script, call: ast.Call, wrapped: set[str]) -> ast.Call | None:
    """Return the forward of a wrapped model: the call itself, or one in the function that the model is passed to."""
    if facts.name(call.func) in wrapped:
        return call
    function = facts.function_of(call)
    if function is None:
        return None
    parameters = [one.arg for one in (*function.args.posonlyargs, *function.args.args)]
    if isinstance(call.func, ast.Attribute):
        parameters = parameters[1:]  # self
    given = {name for name, value in zip(parameters, call.args, strict=False) if facts.name(value) in wrapped}
    return next((inner for inner in _calls_in(facts, function) if facts.name(inner.func) in given), None)


@check(Script)
def model_on_one_rank(facts: Script) -> Iterator[Problem]:
    """The model that DistributedDataParallel wraps is called where only some ranks come.

    If the file shows no layer with buffers, it is a note.

    Cost: Its forward broadcasts buffers first, such as BatchNorm's, also in evaluation: that rank waits for the others.
    Fix: Call the bare model there, or evaluate on all ranks, each its part.
    """
    broadcasting = [one for one in facts.wrappings if constant(argument(one, "broadcast_buffers")) is not False]
    wrapped = {name for one in broadcasting for name in facts.targets(one)}
    # `model = model.module` later on makes the name mean the bare model again, somewhere.
    wrapped -= {name for name in wrapped if any(ast.unparse(one).endswith(".module") for one in facts.values(name))}
    has_buffers = any(_WITH_BUFFERS.search(name.rpartition(".")[2]) for name, _ in facts.calls)
    for _, call in facts.calls:
        guards = facts.guards(call) if wrapped else []
        reached = _forward_of(facts, call, wrapped) if guards else None
        if reached is None:
            continue
        way = "" if reached is call else f" ({ast.unparse(call)} in line {call.lineno})"
        found = f"The wrapped model is called where only ranks with `{guards[0].describe()}` come{way}."
        paste = f"model.module  # instead of the wrapped model in {ast.unparse(call)}"
        yield Problem(HANG if has_buffers else NOTE, found, paste, facts.where(reached))
