//! Promises that were rejected, and that no program handles.
//!
//! Promises: each is reported once on standard error, at the end of the evaluation.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use rquickjs::{Ctx, Persistent, Promise, Runtime, Value};

use crate::host;
use crate::wire::Helpers;

/// Maximum rejections whose reasons are kept.
const MAX_REASONS: usize = 100;
/// The stream for errors.
const STDERR: i32 = 2;

/// A promise and the reason of its rejection.
type Rejection = [Persistent<Value<'static>>; 2];

/// The rejections of an evaluation.
#[derive(Default)]
pub(crate) struct Rejections {
    kept: RefCell<Vec<Rejection>>,
    /// Rejections above [`MAX_REASONS`].
    dropped: Cell<usize>,
}

impl Rejections {
    /// Collects the rejections of a runtime.
    pub(crate) fn track(runtime: &Runtime) -> Rc<Self> {
        let this = Rc::new(Self::default());
        let tracker = Rc::clone(&this);
        runtime.set_host_promise_rejection_tracker(Some(Box::new(
            move |ctx, promise, reason, is_handled| {
                if is_handled {
                    // One that is not kept was dropped.
                    if !tracker.forget(&ctx, &promise) {
                        tracker.dropped.set(tracker.dropped.get().saturating_sub(1));
                    }
                } else if tracker.kept.borrow().len() < MAX_REASONS {
                    let rejection = [promise, reason].map(|value| Persistent::save(&ctx, value));
                    tracker.kept.borrow_mut().push(rejection);
                } else {
                    tracker.dropped.set(tracker.dropped.get() + 1);
                }
            },
        )));
        this
    }

    /// Removes a promise that is handled. Returns whether it was kept.
    pub(crate) fn forget<'js>(&self, ctx: &Ctx<'js>, promise: &Value<'js>) -> bool {
        let is_other =
            |[kept, _]: &Rejection| kept.clone().restore(ctx).is_ok_and(|kept| kept != *promise);
        let mut all = self.kept.borrow_mut();
        let before = all.len();
        all.retain(is_other);
        all.len() < before
    }

    /// As [`forget`](Self::forget).
    pub(crate) fn forget_promise<'js>(&self, ctx: &Ctx<'js>, promise: &Promise<'js>) {
        self.forget(ctx, promise.as_value());
    }

    /// Reports all.
    pub(crate) fn report(&self, ctx: &Ctx<'_>, helpers: &Helpers) {
        for [_, reason] in self.kept.take() {
            let shown = reason.restore(ctx).ok().and_then(|reason| helpers.show(ctx, reason).ok());
            if shown.is_none() {
                drop(ctx.catch());
            }
            let shown = shown.as_deref().unwrap_or("a value that cannot be shown");
            host::print(STDERR, &format!("Uncaught (in promise) {shown}\n"));
        }
        let dropped = self.dropped.take();
        if dropped > 0 {
            host::print(STDERR, &format!("{dropped} more promises were rejected\n"));
        }
    }
}
