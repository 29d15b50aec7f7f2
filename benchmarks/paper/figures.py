"""All figures in the report's order, each with what the paper says."""

from __future__ import annotations

from benchmarks.paper.figures_more import (
    controller,
    controller_needs,
    delay,
    path_needs,
    paths,
    scale,
    scale_needs,
    slow,
    sweep_needs,
    time_needs,
    where,
)
from benchmarks.paper.figures_paper import (
    ablation_needs,
    ablations,
    constrained,
    constrained_all,
    gpu,
    gpu_needs,
    nodes_needs,
    prompts,
    prompts_needs,
    readings,
    readings_needs,
    speed,
    ttft,
)
from benchmarks.paper.figures_trees import tree_needs, trees
from benchmarks.paper.figures_wide import on_grids, wide_needs
from benchmarks.paper.plots import Figure

FIGURES = (
    Figure("speed", "Generation speed and nodes (Fig. 4)",
           "PipeInfer is faster in every case: 1.5 to 2.15 times synchronous speculation (up to "
           "1.7 well aligned, 2.15 poorly). Iterative and speculative speed hardly change with "
           "the number of nodes; Goliath is fastest at 8 nodes.", nodes_needs, speed),
    Figure("readings", "What the acceptance is a share of",
           "79, 66, 52, 61, 69, 69 % with trees of four tokens; of what is not said. Its authors' "
           "program prints accepted over drafted tokens.", readings_needs, readings),
    Figure("ttft", "Time to first token (Fig. 5)",
           "PipeInfer is near parity with iterative inference, synchronous speculation far "
           "slower.", nodes_needs, ttft),
    Figure("constrained", "Gigabit Ethernet and old machines (Figs. 7b, 7c)",
           "PipeInfer's greatest gains over synchronous speculation. Five slow nodes more: Dolphin "
           "loses marginally, Falcon substantially, Goliath gains. Time to first token sometimes "
           "below iterative's.", constrained_all, constrained),
    Figure("ablations", "Components switched off (Fig. 8)",
           "Without cancellation slower; without continuous speculation severely slower (Falcon "
           "moderately). Multibuffering and asynchronous speculation could not be measured: the "
           "output became incoherent.", ablation_needs, ablations),
    Figure("trees", "Trees, and trees of two drafts",
           "Its text speaks of trees of guesses and of several drafts; it reports trees of four "
           "tokens and names no number of paths.", tree_needs, trees),
    Figure("gpu", "Four GPUs (Fig. 9)",
           "PipeInfer is faster than synchronous speculation in all cases but one (Dolphin 2.9).",
           gpu_needs, gpu),
    Figure("prompts", "From prompt to prompt (Fig. 10)",
           "PipeInfer's speed stays consistent, that of synchronous speculation is erratic.",
           prompts_needs, prompts),
    Figure("delay", "Delay of the links, 0 to 75 ms",
           "Not in the paper, but: 'resilience to latency'.", sweep_needs("delay", "delay-gpu"),
           delay),
    Figure("slow", "One slow node",
           "Not in the paper; it splits layers equally.", sweep_needs("slow-planned", "slow-equal"),
           slow),
    Figure("controller", "What tuning while running costs", "Not in the paper.",
           controller_needs, controller),
    Figure("time", "Where the time goes", "Not in the paper.", time_needs, where),
    Figure("cancellation", "How cancellations travel",
           "They hop backwards from stage to stage.", path_needs, paths),
    Figure("wide", "The best grid of wide stages",
           "Not in the paper, whose authors name tensor parallel stages as their next step.",
           wide_needs, on_grids),
    Figure("scale", "Up to 256 stages", "The paper stops at 32 nodes.", scale_needs, scale),
)
