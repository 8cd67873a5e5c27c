//! Host functions: what the embedder lets a guest call, by name, with typed arguments.
//!
//! Wire format, both ways: values one after another, little-endian, without padding; `bool` is one
//! byte, byte strings and text are a `u32` length and the bytes.
//!
//! Promises: a malformed argument list is an error for the guest and never reaches the function.
//! May break it: a function that panics unwinds through the call.

use std::collections::HashMap;
use std::sync::Arc;

/// Reads one value from the front of a byte string.
pub trait FromWire: Sized {
    /// The value, or `None` where the bytes are too short or malformed.
    fn from_wire(bytes: &mut &[u8]) -> Option<Self>;
}

/// Appends one value to a byte string.
pub trait IntoWire {
    /// Appends the value.
    fn into_wire(self, out: &mut Vec<u8>);
}

macro_rules! numbers {
    ($($number:ty),*) => {$(
        impl FromWire for $number {
            fn from_wire(bytes: &mut &[u8]) -> Option<Self> {
                let (head, tail) = bytes.split_first_chunk()?;
                *bytes = tail;
                Some(<$number>::from_le_bytes(*head))
            }
        }
        impl IntoWire for $number {
            fn into_wire(self, out: &mut Vec<u8>) {
                out.extend_from_slice(&self.to_le_bytes());
            }
        }
    )*};
}
numbers!(u8, u16, u32, u64, i8, i16, i32, i64, f32, f64);

impl FromWire for bool {
    fn from_wire(bytes: &mut &[u8]) -> Option<Self> {
        match u8::from_wire(bytes)? {
            0 => Some(false),
            1 => Some(true),
            _ => None,
        }
    }
}

impl IntoWire for bool {
    fn into_wire(self, out: &mut Vec<u8>) {
        out.push(u8::from(self));
    }
}

impl FromWire for Vec<u8> {
    fn from_wire(bytes: &mut &[u8]) -> Option<Self> {
        let len = u32::from_wire(bytes)? as usize;
        let (head, tail) = bytes.split_at_checked(len)?;
        *bytes = tail;
        Some(head.to_vec())
    }
}

impl IntoWire for Vec<u8> {
    fn into_wire(self, out: &mut Vec<u8>) {
        (self.len() as u32).into_wire(out);
        out.extend_from_slice(&self);
    }
}

impl FromWire for String {
    fn from_wire(bytes: &mut &[u8]) -> Option<Self> {
        String::from_utf8(Vec::from_wire(bytes)?).ok()
    }
}

impl IntoWire for String {
    fn into_wire(self, out: &mut Vec<u8>) {
        self.into_bytes().into_wire(out);
    }
}

impl IntoWire for () {
    fn into_wire(self, _: &mut Vec<u8>) {}
}

/// What a host function reports to the guest besides a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HostError {
    /// The arguments do not decode.
    #[error("the arguments do not decode as the host function's types")]
    Arguments,
    /// The function failed.
    #[error("the host function failed")]
    Failed,
}

/// A typed function that a guest may call; implemented for closures of up to six arguments.
/// A `Result<R, HostError>` as the return type reports failure.
pub trait HostFunction<Arguments>: Send + Sync + 'static {
    /// Decodes the arguments, calls the function, encodes its result.
    ///
    /// # Errors
    /// See [`HostError`].
    fn call(&self, arguments: &[u8]) -> Result<Vec<u8>, HostError>;
}

/// What a host function may return.
pub trait HostReturn {
    /// Encodes the value, or passes the error on.
    ///
    /// # Errors
    /// The function's own.
    fn encode(self) -> Result<Vec<u8>, HostError>;
}

impl<T: IntoWire> HostReturn for T {
    fn encode(self) -> Result<Vec<u8>, HostError> {
        let mut out = Vec::new();
        self.into_wire(&mut out);
        Ok(out)
    }
}

impl<T: IntoWire> HostReturn for Result<T, HostError> {
    fn encode(self) -> Result<Vec<u8>, HostError> {
        self.and_then(T::encode)
    }
}

macro_rules! functions {
    ($(($($name:ident)*))*) => {$(
        impl<F, R, $($name),*> HostFunction<fn($($name),*) -> R> for F
        where
            F: Fn($($name),*) -> R + Send + Sync + 'static,
            R: HostReturn,
            $($name: FromWire,)*
        {
            #[allow(non_snake_case, unused_mut, reason = "one name for type and value; no arguments")]
            fn call(&self, arguments: &[u8]) -> Result<Vec<u8>, HostError> {
                let mut rest = arguments;
                $(let $name = $name::from_wire(&mut rest).ok_or(HostError::Arguments)?;)*
                if !rest.is_empty() {
                    return Err(HostError::Arguments);
                }
                self($($name),*).encode()
            }
        }
    )*};
}
functions!(()(A)(A B)(A B C)(A B C D)(A B C D E)(A B C D E G));

type Erased = Arc<dyn Fn(&[u8]) -> Result<Vec<u8>, HostError> + Send + Sync>;

/// The functions of one sandbox and of every fork of it.
#[derive(Clone, Default)]
pub(crate) struct HostFunctions {
    names: HashMap<String, usize>,
    functions: Vec<Erased>,
}

impl std::fmt::Debug for HostFunctions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_set().entries(self.names.keys()).finish()
    }
}

impl HostFunctions {
    /// Adds or replaces a function.
    pub(crate) fn add<A: 'static>(&mut self, name: &str, function: impl HostFunction<A>) {
        let erased: Erased = Arc::new(move |arguments| function.call(arguments));
        match self.names.get(name) {
            Some(index) => self.functions[*index] = erased,
            None => {
                self.names.insert(name.to_owned(), self.functions.len());
                self.functions.push(erased);
            }
        }
    }

    pub(crate) fn find(&self, name: &str) -> Option<usize> {
        self.names.get(name).copied()
    }

    pub(crate) fn get(&self, index: u64) -> Option<&Erased> {
        self.functions.get(usize::try_from(index).ok()?)
    }
}
