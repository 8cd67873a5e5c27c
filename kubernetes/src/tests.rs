//! The controller against the servers of [`crate::mock`]: objects of hostile users, faults of
//! servers, and other controllers.

mod absence;
mod fairness;
mod isolation;
mod leaders;
mod operations;
mod ownership;
mod secrets;
