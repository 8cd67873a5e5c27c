//! The controller against a real kube-apiserver with etcd, and a real `afresh serve`. All of them
//! listen on loopback.

mod cluster;
mod faults;
mod hostile;
mod lifecycle;
mod operations;
mod policies;
mod process;
