"""Pictures of results: what a cache holds, accuracy against entries kept, recall and retention by layer, perplexity by
position.

All are readable in black and white: greys, line styles and markers, text at the line's end instead of a legend.
matplotlib is imported where it is used, so nothing else needs it.
"""
import torch

from flex_masks import pyplot


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
    fig.savefig(path, dpi=100)
    plt.close(fig)


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
    fig.savefig(path, dpi=100)
    plt.close(fig)


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
    fig.savefig(path, dpi=100)
    plt.close(fig)


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
    fig.savefig(path, dpi=100)
    plt.close(fig)


def draw_positions(path, rows, edges):
    """`rows` of bench.py text: perplexity against position, and its ratio to dense's, a line a policy and budget.
    edges: bounds of the ranges of positions, as the file has them."""
    plt = pyplot()
    from matplotlib.ticker import LogLocator, NullLocator
    rows = sorted(rows, key=lambda row: (row["policy"] != "dense", row["budget"] or 0, row["policy"]))
    dense = next((row["perplexity_by_position"] for row in rows if row["policy"] == "dense"), None)
    if dense is None:
        raise ValueError("no row of dense to compare with: run bench.py text to its end first")
    x = [(a + b - 1) / 2 for a, b in zip(edges, edges[1:])]
    fig, axes = plt.subplots(2, 1, figsize=(10, 9), sharex=True)
    fig.subplots_adjust(left=0.09, right=0.78, top=0.94, bottom=0.07, hspace=0.12)
    several = len({row["n_sink"] for row in rows if row["policy"] not in ("dense", "tova-layer")}) > 1
    for ax, relative in zip(axes, (False, True)):
        labels = []
        for i, row in enumerate(rows):
            y = [value / d if relative else value for value, d in zip(row["perplexity_by_position"], dense)]
            name = "dense (all entries)" if row["policy"] == "dense" else f"{row['policy']}, {row['budget']} entries"
            name += f", {row['n_sink']} sinks" if several and row["n_sink"] is not None else ""
            if row["policy"] == "dense":
                ax.plot(x, y, color="black", linewidth=1.6, linestyle=(0, (8, 3)))
            else:
                ax.plot(x, y, **line_style(i, row["policy"], row["weights"] == "adapted"))
            labels.append((x[-1], y[-1], name))
        for budget in sorted({row["budget"] for row in rows if row["budget"] and row["budget"] < edges[-1]}):
            ax.axvline(budget, color="0.8", linewidth=0.8)
            if relative:
                ax.annotate(f" {budget} entries", (budget, 0.98), xycoords=("data", "axes fraction"), fontsize=7.5,
                            color="0.35", va="top")
        ax.set_yscale("log")
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 1.2, 1.5, 2, 3, 4, 6, 8), numticks=99))  # not decades alone
        ax.yaxis.set_major_formatter("{x:g}")
        ax.yaxis.set_minor_locator(NullLocator())
        ax.grid(axis="y", color="0.92")
        direct_labels(ax, labels)
    axes[0].set(ylabel="perplexity of the next token, log scale", title=(
        f"Perplexity by position, mean over {rows[0]['n_documents']} documents"))
    axes[1].set(ylabel="perplexity / dense perplexity, log scale",
                xlabel="position of the query (tokens; vertical lines: where a budget is full)")
    fig.savefig(path, dpi=100)
    plt.close(fig)
