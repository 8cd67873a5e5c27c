//! One environment of JavaScript: its guests, its sessions, and its operations that are under way.
//!
//! Promises: [`Environment::end`] ends every operation, and waits for them up to [`END_TIMEOUT`]. Handles of one
//! environment are unknown in others.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::call::Call;
use crate::error::Failure;
use crate::mailbox::{Event, EventKind, Mailbox};
use crate::operation::{self, Reply};
use crate::session::Session;
use crate::threads;
use crate::warm::Warm;

/// Maximum time that the end of an environment waits for operations.
const END_TIMEOUT: Duration = Duration::from_secs(2);

/// An object that JavaScript refers to by its number.
#[derive(Clone)]
enum Object {
    Warm(Arc<Warm>),
    Session(Arc<Session>),
}

#[derive(Default)]
struct Objects {
    next: u32,
    all: HashMap<u32, Object>,
}

/// One environment.
pub(crate) struct Environment {
    mailbox: Arc<Mailbox>,
    objects: Mutex<Objects>,
    calls: Mutex<HashMap<u32, Arc<Call>>>,
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
            objects: Mutex::default(),
            calls: Mutex::default(),
            finished: Condvar::new(),
            ended: AtomicBool::new(false),
        }
    }

    pub(crate) fn mailbox(&self) -> &Mailbox {
        &self.mailbox
    }

    fn add(&self, object: Object) -> u32 {
        let mut objects = lock(&self.objects);
        while objects.all.contains_key(&objects.next) {
            objects.next = objects.next.wrapping_add(1);
        }
        let handle = objects.next;
        objects.next = handle.wrapping_add(1);
        objects.all.insert(handle, object);
        handle
    }

    /// Keeps a guest; returns its handle.
    pub(crate) fn add_warm(&self, warm: Warm) -> u32 {
        self.add(Object::Warm(Arc::new(warm)))
    }

    /// Keeps a session; returns its handle.
    pub(crate) fn add_session(&self, session: Session) -> u32 {
        self.add(Object::Session(Arc::new(session)))
    }

    fn object(&self, handle: u32) -> Option<Object> {
        lock(&self.objects).all.get(&handle).cloned()
    }

    /// The guest of this handle.
    pub(crate) fn warm(&self, handle: u32) -> Result<Arc<Warm>, Failure> {
        match self.object(handle) {
            Some(Object::Warm(warm)) => Ok(warm),
            _ => Err(Failure::sandbox("this guest was disposed of")),
        }
    }

    /// The session of this handle.
    pub(crate) fn session(&self, handle: u32) -> Result<Arc<Session>, Failure> {
        match self.object(handle) {
            Some(Object::Session(session)) => Ok(session),
            _ => Err(Failure::sandbox("this sandbox is closed")),
        }
    }

    /// Forgets an object, which ends with the last operation that uses it.
    pub(crate) fn release(&self, handle: u32) {
        let object = lock(&self.objects).all.remove(&handle);
        if let Some(Object::Session(session)) = &object {
            session.begin_close();
        }
        // Unmapping memory takes time, which JavaScript's thread does not have.
        if let Some(object) = object.filter(|_| !self.has_ended()) {
            threads::run(move || drop(object));
        }
    }

    fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    /// Begins an operation on a thread.
    pub(crate) fn start(self: &Arc<Self>, number: u32, request: String, bytes: Vec<u8>) {
        let call = Arc::new(Call::new(number, Arc::clone(&self.mailbox)));
        lock(&self.calls).insert(number, Arc::clone(&call));
        let ticket = Ticket { environment: Arc::clone(self), call, reply: None };
        if self.has_ended() {
            return;
        }
        threads::run(move || {
            let mut ticket = ticket;
            let reply = operation::run(&ticket.environment, &ticket.call, &request, &bytes);
            ticket.reply = Some(reply);
        });
    }

    /// Ends an operation.
    pub(crate) fn stop(&self, number: u32) {
        if let Some(call) = lock(&self.calls).get(&number) {
            call.stop.set();
        }
    }

    /// Passes the answer to a tool call on.
    pub(crate) fn reply(&self, number: u32, tool_call: u32, answer: Vec<u8>) {
        let call = lock(&self.calls).get(&number).cloned();
        if let Some(call) = call {
            call.reply(tool_call, answer);
        }
    }

    /// Ends all operations and waits for them.
    pub(crate) fn end(&self) {
        self.ended.store(true, Ordering::Release);
        self.mailbox.close();
        let calls = lock(&self.calls);
        calls.values().for_each(|call| call.stop.set());
        let busy = |calls: &mut HashMap<_, _>| !calls.is_empty();
        drop(self.finished.wait_timeout_while(calls, END_TIMEOUT, busy));
        let objects = std::mem::take(&mut lock(&self.objects).all);
        drop(objects);
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
        lock(&self.environment.calls).remove(&number);
        let (detail, pending) = (0, None);
        self.environment.mailbox.send(Event { number, kind, detail, text, bytes, pending });
        self.environment.finished.notify_all();
    }
}
