//! The guests and sessions of one environment, by their handles.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::error::Failure;
use crate::session::Session;
use crate::warm::Warm;

/// An object that JavaScript refers to by its number.
#[derive(Clone)]
pub(crate) enum Object {
    Warm(Arc<Warm>),
    Session(Arc<Session>),
}

/// The objects of one environment.
#[derive(Default)]
pub(crate) struct Objects(Mutex<ObjectTable>);

#[derive(Default)]
struct ObjectTable {
    next: u32,
    all: HashMap<u32, Object>,
}

impl Objects {
    fn lock(&self) -> MutexGuard<'_, ObjectTable> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, object: Object) -> u32 {
        let mut objects = self.lock();
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
        self.lock().all.get(&handle).cloned()
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

    /// Forgets an object, and returns it. A session takes no more calls.
    pub(crate) fn remove(&self, handle: u32) -> Option<Object> {
        let object = self.lock().all.remove(&handle);
        if let Some(Object::Session(session)) = &object {
            session.begin_close();
        }
        object
    }

    /// Forgets all objects.
    pub(crate) fn clear(&self) {
        let all = std::mem::take(&mut self.lock().all);
        drop(all);
    }
}
