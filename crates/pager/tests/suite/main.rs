//! The crate's tests, in one program that is linked once.

mod hostile;
mod image;
mod images;
mod interrupted;
mod page_visibility;
mod restore;
mod stalls;
mod vmm;
