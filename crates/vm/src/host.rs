//! Host functions: functions of the embedder that a guest may call, by name, with typed arguments
//! in the wire format of `afresh_vm_abi`.
//!
//! Promises: a malformed argument list is an error for the guest and never reaches the function.
//! May break it: a function that panics unwinds through the call.

use std::collections::HashMap;
use std::sync::Arc;

pub use afresh_vm_abi::{FromWire, HostError, HostReturn, IntoWire};

/// A typed function that a guest may call; implemented for closures of up to six arguments.
/// A `Result<R, HostError>` as the return type reports failure.
pub trait HostFunction<Arguments>: Send + Sync + 'static {
    /// Decodes the arguments, calls the function, encodes its result.
    ///
    /// # Errors
    /// See [`HostError`].
    fn call(&self, arguments: &[u8]) -> Result<Vec<u8>, HostError>;
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

type ErasedFunction = Arc<dyn Fn(&[u8]) -> Result<Vec<u8>, HostError> + Send + Sync>;

/// The functions of one sandbox and of every fork of it.
#[derive(Clone, Default)]
pub(crate) struct HostFunctions {
    names: HashMap<String, usize>,
    functions: Vec<ErasedFunction>,
}

impl std::fmt::Debug for HostFunctions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_set().entries(self.names.keys()).finish()
    }
}

impl HostFunctions {
    /// Adds or replaces a function.
    pub(crate) fn add<A: 'static>(&mut self, name: &str, function: impl HostFunction<A>) {
        let erased: ErasedFunction = Arc::new(move |arguments| function.call(arguments));
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

    pub(crate) fn get(&self, index: u64) -> Option<&ErasedFunction> {
        self.functions.get(usize::try_from(index).ok()?)
    }
}
