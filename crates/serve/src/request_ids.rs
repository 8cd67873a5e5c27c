//! Numbers of requests.

use std::sync::atomic::{AtomicU64, Ordering};

use hyper::Request;
use hyper::header::HeaderValue;

use crate::span::REQUEST_ID;

/// Numbers of requests: different for every server and request.
pub(crate) struct RequestIds {
    server: u64,
    next: AtomicU64,
}

impl RequestIds {
    pub(crate) fn new() -> Self {
        let mut bytes = [0; 8];
        // Without randomness numbers are still different within this server.
        let _ = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::NONBLOCK);
        Self { server: u64::from_ne_bytes(bytes), next: AtomicU64::new(0) }
    }

    /// The number that a client gave, if it is one that may be written to logs; else a new one.
    pub(crate) fn of<B>(&self, request: &Request<B>) -> HeaderValue {
        let given = request.headers().get(REQUEST_ID).filter(|given| {
            let sane = |b: &u8| b.is_ascii_alphanumeric() || b"-_.".contains(b);
            (1..=64).contains(&given.len()) && given.as_bytes().iter().all(sane)
        });
        if let Some(given) = given {
            return given.clone();
        }
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let text = format!("{:016x}-{number}", self.server);
        HeaderValue::try_from(text).unwrap_or_else(|_| HeaderValue::from_static("none"))
    }
}
