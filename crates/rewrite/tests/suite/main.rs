//! The crate's tests, in one program that is linked once.

mod baked;
mod common;
mod data;
mod direct;
mod linked;
mod random;
mod reset;
mod robust;
