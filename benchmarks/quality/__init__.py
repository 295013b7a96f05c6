"""How good the uncertainty is, on public checkpoints: `make bench-quality`.

    python -m benchmarks.quality [--quick] [--only PATTERN ...] [--list] [--table]

The work is cut into units (network, method, seed, what), each with a JSON file of its own under
benchmarks/results/quality/. A unit whose file is there, made with the settings of today, is
skipped, so that a run which was stopped goes on where it was; a fit goes on from its checkpoint.
`--only 'cifar10-resnet20/ABNN/*'` chooses units by name, `--list` shows what is done, `--quick`
does everything on a few images into benchmarks/results/quality-quick/, and `--table` writes the
tables of docs/results.md and the plots from the JSON files alone. With BAYESIFY_BENCH_UNTIMED set,
for a machine that does other things as well, no fit gets seconds.

    settings     what is run: networks, methods, fit settings, sizes, peers
    units        the units, and which are done
    results      the JSON files
    provenance   who, when, which code
    labels       data; test labels come from one function, which logs who asked
    measures     probabilities to numbers, alike for us and for peers
    headline     fit, measure as fitted, measure calibrated
    extras       attacks, corruption, rotation, people's labels, draws, ablations
    transfer     a checkpoint that is a poor match
    peers        the same measures of other libraries
    tables       what the JSON files say; bars: what of issue 6 holds; markdown, plots: how it looks
"""
