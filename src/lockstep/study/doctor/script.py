"""A training script, read by its syntax tree and never run: do all ranks do together what they must do together?"""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from lockstep.errors import ConfigurationError
from lockstep.study.doctor.findings import HANG, WRONG, Facts, NotChecked, Problem, check

_WRAPPERS = ("DistributedDataParallel", "DDP")
# Packages that wrap models and loaders themselves.
_MANAGERS = ("accelerate", "lightning", "pytorch_lightning", "deepspeed", "composer", "ray", "ignite")

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
_EVALUATION = re.compile(r"(^|_)(val|valid|validation|test|testing|eval|evaluation|dev|infer|predict)", re.IGNORECASE)

# Names in a condition that separate a run on several ranks from one on a single device.
_NO_RANKS = {"distributed", "is_distributed", "ddp", "is_ddp", "world_size", "WORLD_SIZE"}


class Script(Facts):
    """One file, parsed, with the full names of what it calls.

    Args:
        text: Its source.
        path: As the user named it.

    Raises:
        SyntaxError: It is no Python.
    """

    section, topic = "Scripts", "script"

    def __init__(self, text: str, path: str) -> None:
        self.path = path
        self.nodes = list(ast.walk(ast.parse(text, path)))
        self._parents = {child: node for node in self.nodes for child in ast.iter_child_nodes(node)}
        self._imported: dict[str, str] = {}
        for node in self.nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    # `import a.b` binds the name a, `import a.b as c` the whole.
                    first = alias.name.partition(".")[0]
                    self._imported[alias.asname or first] = alias.name if alias.asname else first
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                for alias in node.names:
                    self._imported[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        self.calls = [(self.name(node.func), node) for node in self.nodes if isinstance(node, ast.Call)]
        self.calls.sort(key=lambda item: (item[1].lineno, item[1].col_offset))
        functions = [node for node in self.nodes if isinstance(node, ast.FunctionDef)]
        counts = Counter(function.name for function in functions)
        # Those that share a name are left out, as a call does not show which is meant.
        self._functions = {one.name: one for one in functions if counts[one.name] == 1}

    def name(self, node: ast.AST) -> str:
        """Return the full name of a dotted expression, such as ``torch.nn.Linear`` for ``nn.Linear``."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        first = node.id if isinstance(node, ast.Name) else "?"  # the result of a call has no name
        return ".".join([self._imported.get(first, first), *reversed(parts)])

    def where(self, node: ast.expr) -> str:
        """Return ``FILE:LINE``."""
        return f"{self.path}:{node.lineno}"

    def calls_of(self, *last_names: str) -> list[ast.Call]:
        """Return the calls of what is named so, wherever it comes from."""
        return [call for name, call in self.calls if name.rpartition(".")[2] in last_names]

    def assigned_to(self, call: ast.AST) -> list[str]:
        """Return the names that the statement with ``call`` assigns to, such as ``self.loader``."""
        statement = next(one for one in self.ancestors(call) if isinstance(one, ast.stmt))
        return [self.name(target) for target in _targets_of(statement)]

    def sources(self, node: ast.expr) -> list[ast.expr]:
        """Return an expression and, if it is a name, what is assigned to that anywhere."""
        name = self.name(node)
        assignments = [one for one in self.nodes if isinstance(one, ast.Assign)]
        return [node, *(one.value for one in assignments if name in map(self.name, _targets_of(one)))]

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

    # What kind of script it is.

    @cached_property
    def starts_lockstep(self) -> bool:
        """Whether it calls ``lockstep.init``, which sets the device, or starts ranks by ``lockstep.launch``."""
        return any(name in ("lockstep.init", "lockstep.launch") for name, _ in self.calls)

    @cached_property
    def is_distributed(self) -> bool:
        """Whether it runs on several ranks."""
        return bool(self.calls_of(*_WRAPPERS, "init_process_group", "fully_shard")) or self.starts_lockstep

    @cached_property
    def manager(self) -> str | None:
        """The package that places the model and divides the data in this script's stead, if one does."""
        packages = {name.partition(".")[0] for name in self._imported.values()}
        return next((name for name in _MANAGERS if name in packages), None)

    @property
    def places_itself(self) -> bool:
        """Whether it runs on several ranks, and takes care of samplers and devices itself."""
        return self.is_distributed and self.manager is None

    @property
    def uses_task(self) -> bool:
        """Whether it makes a `lockstep.Task`."""
        return any(name in ("lockstep.Task", "lockstep.train.task.Task") for name, _ in self.calls)

    @property
    def most_workers(self) -> int | None:
        """The largest number of loader processes that is written in it; ``None`` if none is."""
        numbers = [constant(argument(call, "num_workers", 5)) for call in self.calls_of("DataLoader")]
        return max((number for number in numbers if isinstance(number, int)), default=None)

    @property
    def summary(self) -> str:
        """What kind of script it is."""
        kind = f"leaves ranks to {self.manager}" if self.manager else "starts ranks" if self.is_distributed else ""
        return f"{self.path} {'has a lockstep.Task' if self.uses_task else kind or 'has one rank'}; read, not run"

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
        found = [node for node in self.nodes if isinstance(node, ast.Assign) and isinstance(node.value, ast.Compare)]
        flags = [node for node in found if _differs_by_rank(node.value, set())]
        return {self.name(target).rpartition(".")[2] for node in flags for target in node.targets}

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
            found += [form.format(ast.unparse(test)) for test, form in tests if _differs_by_rank(test, self._flags)]
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
        if any(is_rank(name) for name in (function.name, *decorators)):
            return True  # such as @rank_zero_only
        # A function that nobody in this file calls may be called by anybody.
        callers = [call for _, call in self.calls if self.function_of(call) is function]
        return bool(callers) and all(self.is_guarded(call, depth - 1) for call in callers)

    def is_for_one(self, node: ast.AST) -> bool:
        """Return whether ``node`` runs only where the script has asked whether it is distributed, or for the rank."""
        tests = [one.test for one in self.ancestors(node) if isinstance(one, (ast.If, ast.IfExp))]
        return any(names(test) & _NO_RANKS or any(map(is_rank, names(test))) for test in tests)


# Comparisons of the rank, as text, that hold on all ranks or on none: is there more than one?
_IS_DISTRIBUTED = r"[!=]= -1$|> -1$|>= 0$|\bis (not )?None$|\bin os\.environ$"

_LEAVES = (ast.Return, ast.Continue, ast.Break)  # not `raise`: that is how arguments are checked


def read_script(spec: str) -> Script:
    """Return the file of ``FILE.py`` or ``FILE.py:NAME``, parsed.

    Raises:
        ConfigurationError: There is no such file, or it is no Python; names the line.
    """
    path = path_of(spec)
    if not path.is_file():
        raise ConfigurationError(f"{path} is no file.\nName a Python file, or leave it out.")
    try:
        return Script(path.read_text(encoding="utf-8"), str(path))
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
    return call.args[position] if position is not None and position < len(call.args) else None


def has_star(call: ast.Call) -> bool:
    """Return whether arguments are passed that the syntax does not show."""
    return any(isinstance(given, ast.Starred) for given in call.args) or any(one.arg is None for one in call.keywords)


def constant(node: ast.expr | None) -> object:
    """Return the value of a literal; ``None`` for everything else."""
    return node.value if isinstance(node, ast.Constant) else None


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


def _targets_of(statement: ast.AST) -> list[ast.expr]:
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    return [part for one in targets for part in (one.elts if isinstance(one, ast.Tuple) else [one])]


def _differs_by_rank(test: ast.expr, flags: set[str]) -> bool:
    """Return whether ranks may differ in ``test``; not so if it asks whether there are ranks at all."""
    if isinstance(test, ast.BoolOp):
        return any(_differs_by_rank(part, flags) for part in test.values)
    if isinstance(test, ast.UnaryOp):
        return _differs_by_rank(test.operand, flags)
    asks = _IS_DISTRIBUTED if isinstance(test, ast.Compare) else "environ|getenv"
    is_on_rank = any(name in flags or is_rank(name) for name in names(test))
    return is_on_rank and not re.search(asks, ast.unparse(test))


# Data.


def _is_for_evaluation(facts: Script, call: ast.Call, dataset: ast.expr) -> bool:
    if any("train=False" in ast.unparse(source) for source in facts.sources(dataset)):
        return True
    function = facts.function_around(call)
    texts = [str(part.value) for part in ast.walk(dataset) if isinstance(part, ast.Constant)]
    named = [*facts.assigned_to(call), *names(dataset), *texts, function.name if function else ""]
    return any(_EVALUATION.search(part) for name in named for part in name.split("."))


def _is_divided(facts: Script, dataset: ast.expr) -> bool:
    """Return whether the data set is a rank's part already, or a stream."""
    made = {name for source in facts.sources(dataset) for name in names(source)}
    classes = [node for node in facts.nodes if isinstance(node, ast.ClassDef) and node.name in made]
    made |= {name for one in classes for base in one.bases for name in names(base)}
    return any(is_rank(name) or "Iterable" in name or "WebDataset" in name for name in made)


@check(Script)
def sampler_missing(facts: Script) -> Iterator[Problem]:
    """A ``DataLoader`` for training in a script with several ranks has no sampler that knows of ranks.

    Nor is its data set divided otherwise. Loaders whose names show that they are for validation or tests are left out.

    Cost: All ranks go through the whole data set: as much work as all devices can do, for the progress of one.
    Fix: Give the loader a DistributedSampler, which shuffles, too.
    """
    for call in facts.calls_of("DataLoader") if facts.places_itself else ():
        dataset = argument(call, "dataset", 0)
        samplers = [argument(call, "sampler", 3), argument(call, "batch_sampler", 4)]
        if dataset is None or has_star(call) or any(one is not None and ast.unparse(one) != "None" for one in samplers):
            continue
        if facts.is_guarded(call) or _is_for_evaluation(facts, call, dataset) or _is_divided(facts, dataset):
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
    if not facts.places_itself or facts.calls_of("set_epoch"):
        return
    for call in facts.calls_of("DistributedSampler"):
        dataset = argument(call, "dataset", 0)
        is_fixed = constant(argument(call, "shuffle", 3)) is False or facts.name(call.func).startswith("lockstep.")
        if dataset is None or is_fixed or has_star(call) or _is_for_evaluation(facts, call, dataset):
            continue
        name = next(iter(facts.assigned_to(call)), "sampler")
        found = f"{name} is a DistributedSampler that shuffles, and nothing calls set_epoch."
        yield Problem(WRONG, found, f"{name}.set_epoch(epoch)  # first line of the loop over epochs", facts.where(call))


# Devices.


def _gpus_named(facts: Script) -> Iterator[tuple[ast.Call, list[str]]]:
    """Yield the calls that may name a GPU, with the names: ``cuda`` for the current one, or such as ``cuda:0``."""
    for name, call in facts.calls:
        last = name.rpartition(".")[2]
        texts: list[object] = []
        numbers: list[ast.expr] = []
        if last in _WRAPPERS:
            ids = argument(call, "device_ids", 1)
            numbers = ids.elts if isinstance(ids, ast.List) else []
        elif last in ("cuda", "to", "set_device") or name == "torch.device":
            given = [one for one in call.args if not isinstance(one, ast.Call)]  # such as .to(torch.device("cuda"))
            texts = [constant(part) for one in given for part in ast.walk(one) if isinstance(part, ast.expr)]
            numbers = call.args[:1] if last in ("cuda", "set_device") else []
            texts += ["cuda"] if last == "cuda" and not call.args and not call.keywords else []
        texts += [f"cuda:{constant(one)}" for one in numbers if isinstance(constant(one), int)]
        if not facts.is_for_one(call):
            yield call, [text for text in texts if isinstance(text, str)]


@check(Script)
def device_not_set(facts: Script) -> Iterator[Problem]:
    """A GPU's number is written in the script, or it uses the current GPU, which nothing in it sets for each rank.

    ``.cuda()``, ``.to("cuda")`` and ``torch.device("cuda")`` mean the current GPU. That is only reported where the
    ranks are set up in the same file.

    Cost: All ranks use the same GPU: it runs out of memory, and NCCL stops at a duplicate GPU or waits for ever.
    Fix: Choose the GPU by the rank first, or let lockstep.init() do it.
    """
    chooses_visible = any("CUDA_VISIBLE_DEVICES" in names(node) for node in facts.nodes if isinstance(node, ast.Assign))
    is_set = facts.starts_lockstep or facts.calls_of("set_device", "set_device_index") or chooses_visible
    uses_current = facts.calls_of("init_process_group") and not is_set
    paste = 'torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))  # before anything uses CUDA'
    for call, texts in _gpus_named(facts) if facts.places_itself else ():
        is_fixed = any(re.fullmatch(r"cuda:\d+", text) for text in texts)
        if is_fixed or (uses_current and "cuda" in texts):
            means = "names the same GPU" if is_fixed else "means the current GPU, which nothing sets: the same"
            yield Problem(HANG, f"{ast.unparse(call)} {means} on every rank.", paste, facts.where(call))
            return


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
        if not any(is_rank(one) for source in facts.sources(path) for one in names(source)):
            found = f"{ast.unparse(call.func)} writes {ast.unparse(path)} on every rank."
            yield Problem(WRONG, found, f"if dist.get_rank() == 0:\n    {ast.unparse(call)}", facts.where(call))


def _collective_in(facts: Script, call: ast.Call, depth: int = _DEPTH) -> ast.Call | None:
    """Return the call if it is a collective, or else the first one that the called function of this file makes."""
    name = facts.name(call.func)
    is_method = name.rpartition(".")[2] in _COLLECTIVES and name.startswith(_COLLECTIVE_MODULES)
    if is_method or name in _COLLECTIVE_NAMES:
        return call
    function = facts.function_of(call)
    if function is None or depth == 0:
        return None
    inner = [one for _, one in facts.calls if facts.function_around(one) is function]
    return next(filter(None, (_collective_in(facts, one, depth - 1) for one in inner)), None)


@check(Script)
def collective_on_one_rank(facts: Script) -> Iterator[Problem]:
    """A collective that only ranks with a certain condition come to, directly or through functions of the same file.

    A barrier that the other ranks make behind the opposite condition is none: that is how one goes first.

    Cost: They wait for the others until time is up, 10 to 30 minutes; or it meets another collective and mixes data.
    Fix: Let all ranks come to it, and only print or save on one.
    """
    for name, call in facts.calls if facts.is_distributed else ():
        guards = facts.guards(call)
        reached = _collective_in(facts, call) if guards else None
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
