"""The bundled demo model: task generators, training script and evaluation.

Nothing here is needed to run the server; the trained artefact lives in ``mlxpaged/models/demo``.
"""
