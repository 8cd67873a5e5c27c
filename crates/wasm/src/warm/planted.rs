//! Planted bugs in module state: a restore leaves a global, an element of a table or a dropped
//! segment as the call left it. See [`afresh_sys::planted`]; a program without it contains none of
//! this.

use std::collections::{BTreeMap, BTreeSet};

use afresh_rewrite::{VisibleState, WarmState, WarmValue};
use afresh_sys::planted::{Bug, is};
use wasmtime::{AsContextMut, Instance, RootScope};

use crate::host::Host;
use crate::warm::state;

/// The state that a call left, if a bug that keeps some of it is planted.
#[inline]
pub(crate) fn before(
    store: &mut impl AsContextMut<Data = Host>,
    instance: Instance,
    visible: &VisibleState,
) -> Option<WarmState> {
    if !(is(Bug::Global) || is(Bug::Element) || is(Bug::Segment)) {
        return None;
    }
    let mut scope = RootScope::new(store);
    state::read(&mut scope, instance, visible, Vec::new()).ok()
}

/// Puts one thing of `left` back that the restore has changed.
#[inline]
pub(crate) fn after(
    store: &mut impl AsContextMut<Data = Host>,
    instance: Instance,
    visible: &VisibleState,
    left: Option<WarmState>,
) {
    let Some(left) = left else { return };
    let mut scope = RootScope::new(store);
    let Ok(now) = state::read(&mut scope, instance, visible, Vec::new()) else { return };
    // A value that cannot be set stays restored; then the bug does not show in this call.
    let _ = state::apply(&mut scope, instance, &survivor(&left, &now));
}

/// The one thing, as a state of nothing else.
fn survivor(left: &WarmState, now: &WarmState) -> WarmState {
    let mut kept = WarmState::default();
    if is(Bug::Global) {
        let changed = |(index, value): &(&u32, &WarmValue)| {
            **value != WarmValue::Opaque && now.globals.get(index) != Some(value)
        };
        kept.globals = left.globals.iter().filter(changed).take(1).map(|(i, v)| (*i, *v)).collect();
    } else if is(Bug::Element) {
        kept.tables = left
            .tables
            .iter()
            .find_map(|(index, elements)| table(*index, elements, now))
            .unwrap_or_default();
    } else {
        let first = |left: &BTreeSet<u32>, now: &BTreeSet<u32>| {
            left.difference(now).take(1).copied().collect()
        };
        kept.dropped_data = first(&left.dropped_data, &now.dropped_data);
        if kept.dropped_data.is_empty() {
            kept.dropped_elements = first(&left.dropped_elements, &now.dropped_elements);
        }
    }
    kept
}

/// A table as it is now, but for one element.
fn table(index: u32, left: &[WarmValue], now: &WarmState) -> Option<BTreeMap<u32, Vec<WarmValue>>> {
    let mut elements = now.tables.get(&index)?.clone();
    let at = elements
        .iter()
        .zip(left)
        .position(|(now, left)| now != left && *left != WarmValue::Opaque)?;
    elements[at] = left[at];
    Some(BTreeMap::from([(index, elements)]))
}
