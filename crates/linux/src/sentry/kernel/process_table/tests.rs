//! Process tables.

use afresh_files::{Budget, Tree};

use super::*;
use crate::sentry::kernel::tracing::{EVENT_FORK, EVENT_STOP, Trace, TraceStop};

#[test]
fn tables_that_do_not_fit_together_are_refused() {
    let (layout, mut threads) = (Layout::new(1 << 20), Threads::new());
    let (child, thread) = (FIRST + 1, threads.current().clone());
    assert_eq!(threads.take_number(), Ok(child));
    let check = |change: &dyn Fn(&mut ProcessTable)| {
        let mut table = ProcessTable::new();
        let info = ProcessInfo { id: child, parent: FIRST, memory: child, ..ProcessInfo::first() };
        let threads_of_child = Threads::single(child, thread.clone(), &threads);
        let process = Process { info, threads: threads_of_child, ..Process::first() };
        table.current.threads = threads.clone();
        table.others.insert(child, process);
        table.layouts.insert(child, Layout::new(1 << 20));
        change(&mut table);
        table.check(&layout)
    };
    fn own(table: &mut ProcessTable) -> &mut Process {
        table.others.get_mut(&(FIRST + 1)).unwrap()
    }
    assert_eq!(check(&|_| ()), Ok(()));
    assert_eq!(check(&|table| *table = ProcessTable::new()), Ok(()));
    let odd: [&dyn Fn(&mut ProcessTable); 15] = [
        &|table| table.current.info.id = 9,
        &|table| table.current.info.memory = child,
        &|table| table.current.info.parent = child,
        &|table| table.current.info.stopped = Some(65),
        &|table| own(table).info.id = FIRST,
        &|table| own(table).info.parent = child,
        &|table| own(table).info.memory = child + 1,
        // Its memory would have no owner.
        &|table| own(table).info.memory = FIRST,
        &|table| table.layouts.clear(),
        &|table| drop(table.layouts.insert(FIRST, Layout::new(1 << 20))),
        &|table| drop(table.layouts.insert(child, Layout::new(1 << 21))),
        &|table| own(table).threads = Threads::new(),
        &|table| {
            own(table).handlers.insert(65, [0; 32]);
        },
        &|table| {
            let process = own(table).clone();
            table.others.insert(child + 1, process);
        },
        &|table| {
            table
                .ended
                .insert(child, ExitedProcess { parent: FIRST, group: FIRST, status: 0, spent: 0 });
        },
    ];
    for (index, change) in odd.iter().enumerate() {
        assert!(check(change).is_err(), "{index}");
    }
    let borrows = |table: &mut ProcessTable| {
        table.layouts.clear();
        own(table).info.memory = FIRST;
    };
    assert_eq!(check(&borrows), Ok(()));
}

#[test]
fn a_child_that_was_not_made_is_known_to_no_parent_and_no_tracer() {
    let tree = Tree::new(Budget::default());
    let mut state = Kernel::new(Layout::new(1 << 20), tree, None, Vec::new());
    let thread = state.current().threads.current().clone();
    let tracer = state.add_child(thread.clone(), true).unwrap();
    let mut trace = Trace::new(tracer, FIRST, 1 << EVENT_FORK, true);
    let earlier = TraceStop::Event(EVENT_STOP, 5);
    trace.plan(earlier.clone());
    state.processes.tracing.insert(FIRST, trace);
    let before = state.clone();
    let child = state.add_child(thread, true).unwrap();
    state.trace_new(EVENT_FORK, child, child);
    assert!(state.processes.tracing.get(child).is_some());
    state.undo_child(child);
    assert_eq!((&state.processes.tracing, state.check()), (&before.processes.tracing, Ok(())));
    assert_eq!((state.processes.current_id(), state.processes.len()), (FIRST, 2));
    let pending = |id| &state.processes.get(id).unwrap().pending;
    assert!(pending(FIRST).is_empty() && pending(tracer).is_empty());
    let own = state.own_trace_mut().unwrap();
    assert_eq!((own.take_due(), own.take_due()), (Some(earlier), None));
}
