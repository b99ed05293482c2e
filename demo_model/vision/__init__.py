"""The bundled demo model that sees: pictures, conversations, training script and evaluation.

Nothing here is needed to run the server; the trained artefact lives in ``mlxpaged/models/demo_vision``.
"""
