"""Runs the tests of `quickjs-rs` on `afresh.quickjs`: ``pytest -p as_quickjs_rs CHECKOUT/tests/test_snapshot.py``."""

from __future__ import annotations

import sys

import afresh.quickjs

sys.modules["quickjs_rs"] = afresh.quickjs
