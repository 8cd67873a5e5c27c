//! The runtime of a guest in an afresh micro-VM: entry points, typed host functions, a heap,
//! logging, panics with a message.
//!
//! ```ignore
//! #![no_std]
//! #![no_main]
//! extern crate alloc;
//! use alloc::vec::Vec;
//!
//! afresh_guest::host_functions! { fn add(a: u64, b: u64) -> u64; }
//!
//! fn init() {}
//! fn call(input: &[u8]) -> Vec<u8> {
//!     let sum = add(input.len() as u64, 1).unwrap_or(0);
//!     sum.to_le_bytes().to_vec()
//! }
//! afresh_guest::guest!(init, call);
//! ```
//!
//! Everything the guest writes during `init` becomes part of the image; everything it writes during
//! `call` is undone by the host's reset.

#![no_std]

extern crate alloc;

mod entry;
mod heap;
mod host;
mod hypercall;
mod mem;

/// The contract with the host.
pub use afresh_vm_abi as abi;
pub use afresh_vm_abi::{FromWire, IntoWire};
pub use entry::{boot, finish, finish_owned, ready};
pub use heap::Heap;
pub use host::{HostCallError, Import, call_host};
pub use hypercall::{Level, fail, fill_random, generation, log};

/// Defines the program's entry points from two functions: `fn()` for the initialisation and
/// `fn(&[u8]) -> impl Into<Vec<u8>>` for a call.
#[macro_export]
macro_rules! guest {
    ($init:path, $call:path) => {
        #[unsafe(no_mangle)]
        extern "C" fn _start(boot: *const $crate::abi::BootInfo) -> ! {
            extern "C" fn enter(input: *const u8, len: usize) -> ! {
                // SAFETY: the host passes the input buffer and how much of it is filled.
                let input = unsafe { core::slice::from_raw_parts(input, len) };
                $crate::finish_owned($call(input).into())
            }
            // SAFETY: the host passes the boot page.
            unsafe { $crate::ready(boot, $init, enter) }
        }
    };
}

/// Declares functions of the host: `fn name(argument: Type, ...) -> Type;`. Each becomes a Rust
/// function that returns a `Result`.
#[macro_export]
macro_rules! host_functions {
    ($($(#[$meta:meta])* fn $name:ident($($argument:ident: $type:ty),* $(,)?) $(-> $result:ty)?;)*) => {$(
        $(#[$meta])*
        fn $name($($argument: $type),*) -> Result<($($result)?), $crate::HostCallError> {
            static IMPORT: $crate::Import = $crate::Import::new(stringify!($name));
            #[allow(unused_mut)]
            let mut arguments = $crate::Arguments::new();
            $($crate::IntoWire::into_wire($argument, &mut arguments);)*
            IMPORT.call(&arguments)
        }
    )*};
}

/// The buffer that arguments are encoded in.
pub type Arguments = alloc::vec::Vec<u8>;
