//! The crate's tests, in one program that is linked once.

mod hostile;
mod image;
mod interrupted;
mod restore;
mod stalls;
mod vmm;
mod whole;
