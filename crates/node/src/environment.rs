//! One environment of JavaScript: its guests, its sessions, and its operations that are under way.
//!
//! Promises: [`Environment::end`] ends every operation, and waits for them up to [`END_TIMEOUT`].
//! Handles of one environment are unknown in others.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::call::Call;
use crate::error::Failure;
use crate::mailbox::{Event, EventKind, Mailbox};
use crate::objects::Objects;
use crate::operation;
use crate::reply::Reply;
use crate::threads;

/// Maximum time that the end of an environment waits for operations.
const END_TIMEOUT: Duration = Duration::from_secs(2);

/// One environment.
pub(crate) struct Environment {
    mailbox: Arc<Mailbox>,
    objects: Objects,
    pending: Mutex<HashMap<u32, Arc<PendingOperation>>>,
    finished: Condvar,
    ended: AtomicBool,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Environment {
    pub(crate) fn new(mailbox: Mailbox) -> Self {
        Self {
            mailbox: Arc::new(mailbox),
            objects: Objects::default(),
            pending: Mutex::default(),
            finished: Condvar::new(),
            ended: AtomicBool::new(false),
        }
    }

    pub(crate) fn mailbox(&self) -> &Mailbox {
        &self.mailbox
    }

    /// Forgets an object, which ends with the last operation that uses it.
    pub(crate) fn release(&self, handle: u32) {
        let object = self.objects.remove(handle);
        // Unmapping memory takes time, which JavaScript's thread does not have.
        if let Some(object) = object.filter(|_| !self.has_ended()) {
            threads::run(move || drop(object));
        }
    }

    fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    /// Stops the call of a session that is under way; with `close` it is the last one.
    pub(crate) fn interrupt(&self, handle: u32, close: bool) {
        if let Ok(session) = self.objects.session(handle) {
            match close {
                true => session.begin_close(),
                false => session.stop(),
            }
        }
    }

    /// Begins an operation on a thread.
    pub(crate) fn start(self: &Arc<Self>, number: u32, request: String, bytes: Vec<u8>) {
        let call = Arc::new(Call::new(number, Arc::clone(&self.mailbox)));
        let ticket = Ticket { environment: Arc::clone(self), call: Arc::clone(&call), reply: None };
        let queued = Mutex::new(Some(QueuedWork { ticket, request, bytes }));
        let claim = Claim(Arc::new(PendingOperation { call, queued }));
        lock(&self.pending).insert(number, Arc::clone(&claim.0));
        // `end` may have looked at the operations before.
        if !self.has_ended() {
            threads::run(move || claim.0.run());
        }
    }

    fn find(&self, number: u32) -> Option<Arc<PendingOperation>> {
        lock(&self.pending).get(&number).cloned()
    }

    /// Ends an operation.
    pub(crate) fn stop(&self, number: u32) {
        if let Some(pending) = self.find(number) {
            pending.stop();
        }
    }

    /// Passes the answer to a tool call on.
    pub(crate) fn reply(&self, number: u32, tool_call: u32, answer: Vec<u8>) {
        if let Some(pending) = self.find(number) {
            pending.call.reply(tool_call, answer);
        }
    }

    /// Ends all operations and waits for them.
    pub(crate) fn end(&self) {
        self.ended.store(true, Ordering::Release);
        self.mailbox.close();
        let all: Vec<_> = lock(&self.pending).values().cloned().collect();
        all.iter().for_each(|pending| pending.stop());
        let busy = |pending: &mut HashMap<_, _>| !pending.is_empty();
        drop(self.finished.wait_timeout_while(lock(&self.pending), END_TIMEOUT, busy));
        self.objects.clear();
    }
}

/// An operation that has not ended.
struct PendingOperation {
    call: Arc<Call>,
    /// Its work, until a thread takes it.
    queued: Mutex<Option<QueuedWork>>,
}

struct QueuedWork {
    ticket: Ticket,
    request: String,
    bytes: Vec<u8>,
}

impl PendingOperation {
    fn take(&self) -> Option<QueuedWork> {
        lock(&self.queued).take()
    }

    /// Runs it, unless it was stopped before.
    fn run(&self) {
        let Some(QueuedWork { mut ticket, request, bytes }) = self.take() else { return };
        let reply = operation::run(&ticket.environment.objects, &ticket.call, &request, &bytes);
        ticket.reply = Some(reply);
    }

    /// Stops it. One that no thread has taken ends at once.
    fn stop(&self) {
        self.call.stop.set();
        if let Some(mut queued) = self.take() {
            let failure = Failure::stopped("the operation was stopped by its host before it began");
            queued.ticket.reply = Some(Err(failure));
        }
    }
}

/// The work of a thread, which ends the operation even if it never runs.
struct Claim(Arc<PendingOperation>);

impl Drop for Claim {
    fn drop(&mut self) {
        drop(self.0.take());
    }
}

/// An operation that owes JavaScript one event.
struct Ticket {
    environment: Arc<Environment>,
    call: Arc<Call>,
    reply: Option<Result<Reply, Failure>>,
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let lost = || Err(Failure::sandbox("the operation could not run, or panicked"));
        let (kind, text, bytes) = match self.reply.take().unwrap_or_else(lost) {
            Ok(reply) => (EventKind::Done, reply.json.to_string(), reply.bytes),
            Err(failure) => (EventKind::Failed, failure.json().to_string(), Vec::new()),
        };
        let number = self.call.number;
        // Before JavaScript hears of the end, which may use the number again.
        lock(&self.environment.pending).remove(&number);
        let (detail, pending) = (0, None);
        self.environment.mailbox.send(Event { number, kind, detail, text, bytes, pending });
        self.environment.finished.notify_all();
    }
}
