"""Pictures of results: what a cache holds, accuracy against entries kept, recall and retention by layer, perplexity by
position.

All are readable in black and white: greys, line styles and markers, text at the line's end instead of a legend.
matplotlib is imported where it is used, so nothing else needs it.
"""
import io
from collections import Counter

import torch

from flex_masks import pyplot
from scorer import LEARNED


def save(fig, path):
    """The figure as a PNG in greys, a third of the bytes of the same picture in colours that it does not use."""
    from PIL import Image  # matplotlib brings it
    page = io.BytesIO()
    fig.savefig(page, dpi=100)
    Image.open(page).convert("L").save(path, "PNG", optimize=True)
    pyplot().close(fig)


def draw_kept(path, kept, texts, n_prompt, title, columns=128):
    """Which tokens a cache holds: a column per token, labelled by `texts`, a row per layer, wrapped into strips.
    kept: for each layer and KV head the positions held. Black = held by all KV heads of the layer, white = by none;
    hatched = past the end; a triangle at n_prompt."""
    plt = pyplot()
    n_layer, n_head, n_strip = len(kept), len(kept[0]), -(-len(texts) // columns)
    count = torch.tensor([[sum(t in head for head in heads) for t in range(len(texts))]
                          for heads in ([set(head) for head in heads] for heads in kept)])  # (n_layer, T)
    height = n_strip * (0.13 * n_layer + 0.42) + 1.2
    fig, axes = plt.subplots(n_strip, 1, figsize=(17, height), squeeze=False, layout="constrained")
    for start, ax in zip(range(0, len(texts), columns), axes[:, 0]):
        labels = texts[start:start + columns]
        image = ax.pcolormesh(count[:, start:start + columns], cmap=plt.get_cmap("Greys", n_head + 1), vmin=-0.5,
                              vmax=n_head + 0.5, edgecolors="0.75", linewidth=0.3)
        ax.set(xlim=(0, columns), ylim=(n_layer, 0), ylabel=f"layer\n(from {start})")
        ax.set_yticks([0.5, n_layer - 0.5], [0, n_layer - 1])
        ax.set_xticks([i + 0.5 for i in range(len(labels))], labels, family="monospace")
        ax.tick_params(length=0, pad=1, labelsize=7)
        ax.axvspan(len(labels), columns, facecolor="none", edgecolor="0.5", hatch="///")
        if start <= n_prompt < start + columns:
            ax.plot(n_prompt - start + 0.5, -0.35, "kv", markersize=5, clip_on=False)
    axes[-1, 0].set_xlabel("token, in order of position (triangle: the first generated one)")
    fig.suptitle(title, fontsize=10)
    fig.colorbar(image, ax=axes[:, 0], ticks=range(n_head + 1), label="KV heads that hold the token at the end",
                 shrink=min(1.0, 4 / height), aspect=12, pad=0.01)
    save(fig, path)


def direct_labels(ax, labels):
    """Text at the right of an axis instead of a legend, pushed apart where lines end close together.
    labels: list of (x, y, text), in data coordinates."""
    to_share = lambda xy: ax.transAxes.inverted().transform(ax.transData.transform(xy))[1]  # noqa: E731
    labels = sorted((to_share(label[:2]), *label) for label in labels)
    gap, heights = 0.135 / (ax.figure.get_size_inches()[1] * ax.get_position().height), []
    for share, *_ in labels:
        heights.append(max(share, heights[-1] + gap) if heights else max(share, 0.0))
    over = max(0.0, heights[-1] - 1.0) if heights else 0.0
    for i in reversed(range(len(heights))):  # what does not fit at the top pushes downwards
        heights[i] = min(heights[i], 1.0 - (len(heights) - 1 - i) * gap) if over else heights[i]
    for height, (_, x, y, text) in zip(heights, labels):
        ax.annotate(text, (x, y), (1.06, height), textcoords="axes fraction", fontsize=7.5, va="center",
                    annotation_clip=False, arrowprops=dict(arrowstyle="-", color="0.7", linewidth=0.6, linestyle=":"))


def line_style(i, policy, trained):
    """Distinct in black and white: a marker a line, black and filled if trained, dots for the oracle."""
    bound = policy.startswith("oracle")
    return dict(marker="os^vDPX*<>phd"[i % 13], linestyle=":" if bound else ("-", "--", "-.")[i % 3], markersize=5,
                color="black" if trained or bound else "0.45", linewidth=1.6 if trained or bound else 0.8,
                markerfacecolor="black" if trained and not bound else "white")


def draw_accuracy(path, rows):
    """`rows` of bench.py quality: pass@1 and wrong bytes against entries kept, a line a policy, two axes a task."""
    plt = pyplot()
    rows = [row for row in rows if row["n_rollouts"] == 1 and row["pass_at_1"] is not None]
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    fig, axes = plt.subplots(len(tasks), 2, figsize=(13, 6 * len(tasks)), squeeze=False)
    fig.subplots_adjust(left=0.06, right=0.87, top=1 - 0.4 / (6 * len(tasks)), bottom=0.6 / (6 * len(tasks)),
                        wspace=0.45, hspace=0.25)
    wrong = lambda row: max(1000 * (1 - row["token_accuracy"]), 0.01)  # noqa: E731
    for task, pair in zip(tasks, axes):
        mine, lines = [row for row in rows if row["task"] == task], {}
        for row in mine:
            adapted, note = row["weights"] == "adapted", ""
            if adapted == (row["policy"] == "oracle"):  # the one is usual on the base, the trained on their own weights
                note = " (adapted)" if adapted else " (frozen base)" if row["trained_tokens"] != 0 else ""
            lines.setdefault(row["policy"] + note, []).append(row)
        for ax, value in zip(pair, (lambda row: row["pass_at_1"], wrong)):
            labels, budgets = [], sorted({row["budget"] for row in mine if row["budget"]})
            for i, (name, line) in enumerate(sorted(lines.items())):
                line = sorted(line, key=lambda row: row["budget"] or 0)
                x, y = [row["budget"] for row in line], [value(row) for row in line]
                if name == "dense":
                    ax.axhline(y[0], color="black", linewidth=1.0, linestyle=(0, (8, 3)))
                    labels.append((budgets[-1] if budgets else 1, y[0], "dense (all entries)"))
                    continue
                ax.plot(x, y, **line_style(i, name, line[0]["trained_tokens"]))
                if value is not wrong:
                    ax.vlines(x, [r["ci_low"] for r in line], [r["ci_high"] for r in line], color="0.6", linewidth=0.8)
                labels.append((x[-1], y[-1], name))
            ax.set_xscale("log", base=2)
            ax.set_xticks(budgets, budgets)
            ax.minorticks_off()
            ax.set_xlabel("entries kept per KV head and layer (budget), log scale")
            if value is wrong:
                ax.set(yscale="log", ylabel="wrong bytes per 1000 of the trace, teacher-forced (0.01: none)",
                       title=f"{task}: errors (less is better)")
            else:
                ax.set(ylim=(-0.02, 1.02), ylabel="pass@1, greedy (share of problems; bars: 95 % interval)",
                       title=f"{task}: pass@1, {max(row['n_problems'] for row in mine)} problems")
            ax.grid(axis="y", color="0.92")
            direct_labels(ax, labels)
    save(fig, path)


def draw_recall(path, rows):
    """Recall by layer, from `rows` that have it: a line a policy and budget."""
    plt = pyplot()
    fig, ax = plt.subplots(figsize=(8, 5))
    fig.subplots_adjust(left=0.09, right=0.64, top=0.92, bottom=0.11)
    for i, row in enumerate(rows):
        ax.plot(row["recall_by_layer"], **line_style(i, row["policy"], row["trained_tokens"]))
    n_layer = max(len(row["recall_by_layer"]) for row in rows)
    ax.set(xlabel="layer", ylabel="recall (share of what future attention would keep)", ylim=(0, 1),
           xticks=range(n_layer), title="What a policy keeps of the teacher's selection")
    ax.grid(axis="y", color="0.92")
    direct_labels(ax, [(len(row["recall_by_layer"]) - 1, row["recall_by_layer"][-1],
                        f"{row['policy']} ({row['weights']}), {row['budget']} entries, {row['task']}") for row in rows])
    save(fig, path)


def draw_retention(path, rows):
    """Share of later queries that still see a token, by kind of token and layer: a table of greys a policy."""
    plt = pyplot()
    columns = min(4, len(rows))
    n_rows = -(-len(rows) // columns)
    fig, axes = plt.subplots(n_rows, columns, figsize=(3.4 * columns + 0.8, 2.7 * n_rows + 0.6), squeeze=False,
                             layout="constrained")
    for ax in axes.flat[len(rows):]:
        ax.axis("off")
    for row, ax in zip(rows, axes.flat):
        kinds = [kind for kind, layers in row["retention"].items() if layers]
        table = list(zip(*(row["retention"][kind] for kind in kinds)))  # layers, each a share a kind
        image = ax.imshow(table, cmap="Greys", vmin=0, vmax=1, aspect="auto")
        for layer, line in enumerate(table):
            for kind, share in enumerate(line):
                ax.text(kind, layer, f"{share:.2f}", ha="center", va="center", fontsize=8,
                        color="white" if share > 0.55 else "black")
        ax.set_xticks(range(len(kinds)), [kind.replace(" ", "\n") for kind in kinds], fontsize=8)
        ax.set_yticks(range(len(table)))
        ax.set(ylabel="layer")
        ax.set_title(f"{row['policy']} ({row['weights']}), {row['budget']} entries, {row['task']}", fontsize=9)
    fig.colorbar(image, ax=axes, label="share of later queries that still see a token\n(mean over tokens and KV heads)",
                 shrink=min(1.0, 1.5 / n_rows))
    save(fig, path)


def draw_positions(path, rows, edges):
    """`rows` of bench.py text: perplexity against position, and its ratio to dense's; a column a budget, a line a
    policy, black if it was trained. edges: bounds of the ranges of positions, as the file has them."""
    plt = pyplot()
    from matplotlib.ticker import LogLocator, NullLocator
    dense = next((row for row in rows if row["policy"] == "dense"), None)
    if dense is None:
        raise ValueError("no row of dense to compare with: run bench.py text to its end first")
    dense, n_documents = dense["perplexity_by_position"], dense["n_documents"]
    rows = [row for row in rows if row["policy"] != "dense"]
    several = len({row["n_sink"] for row in rows if row["policy"] != "tova-layer"}) > 1
    twins = Counter((row["policy"], row["budget"], row["n_sink"]) for row in rows)

    def name(row):
        sinks = f", {row['n_sink']} sinks" if several and row["n_sink"] is not None else ""
        who = f" ({row['model']})" if twins[row["policy"], row["budget"], row["n_sink"]] > 1 else ""
        return row["policy"] + sinks + who
    names, x = sorted({name(row) for row in rows}), [(a + b - 1) / 2 for a, b in zip(edges, edges[1:])]
    budgets = sorted({row["budget"] for row in rows}) or [edges[-1]]
    fig, axes = plt.subplots(2, len(budgets), figsize=(4.6 * len(budgets) + 0.6, 8), sharex=True, sharey="row",
                             squeeze=False)
    width, labels = fig.get_size_inches()[0], {}
    fig.subplots_adjust(left=0.7 / width, right=1 - 1.1 / width, top=0.9, bottom=0.1, hspace=0.08, wspace=0.34)
    for budget, pair in zip(budgets, axes.T):
        mine = [row for row in rows if row["budget"] == budget]
        for ax, relative in zip(pair, (False, True)):
            over = dense if relative else [1] * len(dense)
            y = [value / d for value, d in zip(dense, over)]
            ax.plot(x, y, color="black", linewidth=1.6, linestyle=(0, (8, 3)))
            labels[ax] = [(x[-1], y[-1], "dense")]
            for row in mine:
                y = [value / d for value, d in zip(row["perplexity_by_position"], over)]
                trained = row["weights"] == "adapted" or row["policy"] in LEARNED
                ax.plot(x, y, **line_style(names.index(name(row)), row["policy"], trained))
                labels[ax].append((x[-1], y[-1], name(row)))
            if budget < edges[-1]:
                ax.axvline(budget, color="0.7", linewidth=0.8)
            ax.set_yscale("log")
            ax.grid(axis="y", color="0.92")
        pair[0].set_title(f"{budget} entries", fontsize=10)
        pair[1].set_xlabel("position of the query (tokens)")
    for ax in axes.flat:  # now that a row has its limits
        low, high = ax.get_ylim()
        subs = (1, 1.1, 1.2, 1.3, 1.4, 1.5, 1.7, 2, 2.5, 3, 4, 5, 6, 7, 8) if high < 4 * low else (1, 1.5, 2, 3, 4, 6)
        ax.yaxis.set_major_locator(LogLocator(subs=subs, numticks=99))  # not decades alone
        ax.yaxis.set_major_formatter("{x:g}")
        ax.yaxis.set_minor_locator(NullLocator())
        direct_labels(ax, labels[ax])
    axes[0, 0].set_ylabel("perplexity of the next token, log scale")
    axes[1, 0].set_ylabel("perplexity / dense perplexity, log scale")
    fig.suptitle(f"Perplexity by position, mean over {n_documents} documents (dashes: dense, all entries; black: "
                 "trained; vertical line: the budget is full)", fontsize=11)
    save(fig, path)
