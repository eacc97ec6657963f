"""The figure of notebook 00: where the weights of a model are, and which of them work for one token."""

from __future__ import annotations

from moe_lib.config import MoEConfig
from moe_lib.figures.base import BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILION, YELLOW, Figure

COLOURS = (BLUE, ORANGE, VERMILION, GREEN, SKY, PURPLE, YELLOW)
ENOUGH_FOR_WORDS = 0.06  # of a bar's length


def parts(config: MoEConfig) -> dict[str, tuple[int, int]]:
    """The model's weights by part, each as (all, used for one token).

    A token looks up one row of the embedding, so that table counts as unused; the head as used.
    """
    layers, dense, k = config.n_moe_layers, config.first_k_dense_replace, config.num_experts_per_tok
    norms = (2 * config.num_hidden_layers + 1) * config.hidden_size
    attention = config.num_hidden_layers * config.attention_params

    def everywhere(n: int) -> tuple[int, int]:
        return n, n

    return {
        "routed experts": (layers * config.routed_params, layers * k * config.params_per_expert),
        "shared experts": everywhere(layers * config.shared_params),
        "gates": everywhere(layers * config.router_params),
        "attention": everywhere(attention),
        "dense feed-forward": everywhere(dense * config.dense_ffn_params),
        "embedding and head": (2 * config.embedding_params, config.embedding_params),
        "norms": everywhere(norms),
    }


def where_the_weights_are(config: MoEConfig) -> Figure:
    """Two bars of equal length: the shares of all weights, and of those that one token uses."""
    shares = parts(config)
    totals = [sum(pair[i] for pair in shares.values()) for i in (0, 1)]
    rows = [f"all weights\n{totals[0] / 1e9:,.1f} billion", f"for one token\n{totals[1] / 1e9:,.1f} billion"]
    words = []
    for i, row in enumerate(rows):
        largest = sorted(shares.items(), key=lambda item: -item[1][i])
        each = ", ".join(f"{name} {_percent(pair[i] / totals[i])}" for name, pair in largest)
        words.append(f"{row[0].upper()}{row[1:]}: {each}.".replace("\n", ", "))
    figure = Figure(alt=f"Two bars. {' '.join(words)}", figsize=(8.6, 2.6))
    ax = figure.subplots()
    for i in (0, 1):
        left = 0.0
        for (name, pair), colour in zip(shares.items(), COLOURS):
            share = pair[i] / totals[i]
            ax.barh(i, share, left=left, color=colour, edgecolor="white", label=name if i == 0 else None)
            if share > ENOUGH_FOR_WORDS:
                dark = colour in (BLUE, VERMILION)
                ax.text(left + share / 2, i, f"{share:.1%}", ha="center", va="center", color="white" if dark else "black")
            left += share
    ax.set(yticks=[0, 1], yticklabels=rows, xlim=(0, 1), xticks=[])
    ax.invert_yaxis()
    ax.spines[["left", "bottom"]].set_visible(False)
    ax.tick_params(left=False)
    ax.legend(ncols=4, loc="upper center", bbox_to_anchor=(0.45, -0.02), fontsize=9, frameon=False)
    return figure


def _percent(share: float) -> str:
    return f"{share:.1%}" if share >= 0.0005 else "under 0.1%"
