//! Terminals and their line discipline.

pub(super) mod line_discipline;
pub(super) mod terminal;
pub(super) mod terminals;
