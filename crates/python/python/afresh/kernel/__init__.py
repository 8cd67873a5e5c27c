"""A Jupyter kernel whose cells run in a sandbox, and can be undone.

``python -m afresh.kernel install`` adds it to Jupyter. The kernel within the sandbox is `ipykernel`, unmodified; this
package adds ``%undo``, ``%checkpoint``, ``%back``, ``%fork``, ``%tree`` and ``%costs``.
"""
