"""The comparison of `benchmarks/compare.py`: the same requests to mlxpaged and to other MLX servers, one at a time.

options       the command line                               client   one streamed request, each chunk with its time
environments  one per server; which BLAS is in it            loads    A to E: who asks what, when
servers       command lines, start, stop, memory             metrics  a load's answers -> figures
model         the benchmark model; texts of given lengths    report   figures -> Markdown, ratios; chart: a PNG
run           the order of it all, and its JSON          agent    sessions of an agent, and a restart

`options` and `environments` run on a bare Python: the rest needs what `environments` installs for the driver.
"""
