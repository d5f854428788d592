"""What every benchmark does with its rows: the JSON under assets/results, resuming, tables, intervals, progress.

- `write_results`, `earlier_rows`: one file a run, whole or not at all; a later run goes on from its rows;
- `bootstrap`, `pass_rates`: 95 % intervals, problems kept in pairs with the reference;
- `Table`: the rows of a run that goes on where it stopped; `require`: numbers of its command line;
- `Clock`, `print_table`: what the terminal shows.
"""
import sys
import time
from pathlib import Path

import torch

from data.parallel import world_size
from data.run import provenance
from model import read_json, write_json

RESULTS = Path("assets/results")


def write_results(name, rows, device, **extra):
    """assets/results/NAME.json, whole or not at all."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    start = "python" if world_size() == 1 else f"torchrun --nproc-per-node {world_size()}"
    write_json(path, {"name": name, "command": " ".join([start, *sys.argv]), **provenance(device), **extra,
                      "rows": rows})
    return path


def earlier_rows(name, strict=False, **settings):
    """Rows of an earlier run of the same benchmark with the same settings; [] where there is none. strict: ValueError
    where there is one with other settings, so that no long run is overwritten by mistake."""
    path = RESULTS / f"{name}.json"
    earlier = read_json(path) if path.is_file() else {"rows": [], **settings}
    differ = [key for key in settings if earlier.get(key) != settings[key]]
    if differ and strict:
        raise ValueError(f"{path} was made with {differ[0]} {earlier.get(differ[0])}, not {settings[differ[0]]}: move "
                         "it away, or choose another name with --out")
    return [] if differ else earlier["rows"]


def print_table(rows, columns):
    """Columns of equal width, numbers to four digits."""
    def cell(value):
        return "-" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)
    table = [list(columns)] + [[cell(row.get(c)) for c in columns] for row in rows]
    widths = [max(len(line[i]) for line in table) for i in range(len(columns))]
    for line in table:
        print("  ".join(text.rjust(width) for text, width in zip(line, widths)))


def bootstrap(values, reference=None, n=2000, seed=0):
    """95 % interval over problems of mean(values), or of mean(values) / mean(reference) with problems kept in pairs."""
    m = len(values)
    pick = torch.randint(m, (n, m), generator=torch.Generator().manual_seed(seed))
    total = lambda x: torch.tensor([float(y) for y in x], dtype=torch.float64)[pick].sum(1)  # noqa: E731
    bottom = torch.full((n,), float(m), dtype=torch.float64) if reference is None else total(reference)
    stats = torch.where(bottom > 0, total(values) / bottom, 0.0).sort().values
    return stats[int(0.025 * n)].item(), stats[int(0.975 * n)].item()


def matches(row, **values):
    return all(row[key] == value for key, value in values.items())


class Clock:
    """Progress of a run of many jobs, of which some may be there already."""

    def __init__(self, n_jobs):
        self.n_jobs, self.number, self.spent = n_jobs, 0, []

    def start(self):
        self.number, self.started = self.number + 1, time.time()

    def seconds(self):
        return round(time.time() - self.started, 1)

    def say(self, text):
        self.spent.append(self.seconds())
        left = sum(self.spent) / len(self.spent) * (self.n_jobs - self.number)
        print(f"{self.number}/{self.n_jobs} {text}; {self.spent[-1]:.0f} s, about {left:.0f} s left", flush=True)


def pass_rates(right, n_rollouts, dense=None):
    """right: right rollouts of each problem, None where it was impossible; dense: the same of the dense base, as its
    row has it, None if this is it -> the keys of a row that follow from them."""
    if right is None:
        return dict.fromkeys(("pass_at_1", "ci_low", "ci_high", "relative", "relative_low", "relative_high", "right"))
    share, text = [n / n_rollouts for n in right], " ".join(map(str, right))
    reference = [int(n) / n_rollouts for n in (dense or text).split()]
    (low, high), ratio = bootstrap(share), (None, None, None)
    if sum(reference):  # a ratio to nothing says nothing
        ratio = sum(share) / sum(reference), *bootstrap(share, reference)
    return dict(pass_at_1=sum(share) / len(share), ci_low=low, ci_high=high, relative=ratio[0], relative_low=ratio[1],
                relative_high=ratio[2], right=text)


def require(args, **lows):
    """ValueError for the first option below its least value; options of several values are checked each."""
    for name, low in lows.items():
        given = getattr(args, name)
        for value in given if isinstance(given, list) else [given]:
            if value is not None and value < low:
                raise ValueError(f"--{name.replace('_', '-')} must be at least {low}, got {value}")


class Table:
    """Rows of assets/results/NAME.json, written after each. settings: what all rows share; a file with others is
    refused (ValueError), so that no long run is overwritten by mistake. extra: kept in the file and not compared."""

    def __init__(self, name, device, extra=None, **settings):
        self.name, self.device, self.settings, self.extra = name, device, settings, extra or {}
        self.rows = earlier_rows(name, strict=True, **settings)

    def having(self, who, how):
        """The rows of `who` that are there already; those of a former checkpoint or setting `how` go."""
        self.rows = [r for r in self.rows if matches(r, **how) or not matches(r, **who)]
        return [r for r in self.rows if matches(r, **who)]

    def add(self, *rows):
        self.rows += rows
        return self.write()

    def write(self):
        return write_results(self.name, self.rows, self.device, **self.extra, **self.settings)
