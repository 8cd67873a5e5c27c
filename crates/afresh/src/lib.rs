//! Start every run from the same memory, and pay only for the pages that the last run changed.
//!
//! [`open`] opens a guest and warms it: a Wasm module or component, a program for a micro-VM or for
//! Linux, or a snapshot of a warm guest, local or remote. Every call of the [`Guest`] starts from
//! the warm state, byte for byte. Undoing a call costs the pages that it wrote.
//!
//! ```
//! # #[cfg(feature = "wasm")]
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use afresh::{Call, Options};
//! # let dir = tempfile::tempdir()?;
//! # let path = dir.path().join("counter.wasm");
//! # std::fs::write(&path, wat::parse_str(r#"(module (memory 1)
//! #   (func (export "init") (param i32) (i32.store (i32.const 0) (local.get 0)))
//! #   (func (export "next") (param i32) (result i32)
//! #     (i32.store (i32.const 0) (i32.add (i32.load (i32.const 0)) (local.get 0)))
//! #     (i32.load (i32.const 0))))"#)?)?;
//! # let path = path.to_str().unwrap();
//!
//! let guest = afresh::open(path, &Options::new().warm(Call::text("init", ["40"])))?;
//! for _ in 0..3 {
//!     assert_eq!(guest.invoke(&Call::text("next", ["2"]))?.text(), "42");
//! }
//!
//! let mut lease = guest.lease()?; // calls that belong together
//! lease.invoke(&Call::text("next", ["2"]))?;
//! assert_eq!(lease.invoke(&Call::text("next", ["2"]))?.text(), "44");
//! # Ok(())
//! # }
//! # #[cfg(not(feature = "wasm"))]
//! # fn main() {}
//! ```
//!
//! [`Guest::save`] saves the warm state as a snapshot, and [`Lease::save`] the state after calls.
//! [`open`] opens either, on this machine or another, and fetches pages as they are touched.
//!
//! # Sessions
//!
//! A [`Session`] is a live guest whose calls build on one another. It takes checkpoints, rolls back
//! to any of them, and forks. Each costs the pages that have changed:
//!
//! ```
//! # #[cfg(feature = "wasm")]
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # use afresh::{Call, Guest, Options};
//! # let wasm = wat::parse_str(r#"(module (memory 1)
//! #   (func (export "add") (param i32) (result i32)
//! #     (i32.store (i32.const 0) (i32.add (i32.load (i32.const 0)) (local.get 0)))
//! #     (i32.load (i32.const 0))))"#)?;
//! # let guest = Guest::from_bytes("counter", &wasm, &Options::new())?;
//! let add = |number: &str| Call::text("add", [number]);
//! let mut session = guest.session()?;
//! session.invoke(&add("40"))?;
//! session.checkpoint("forty")?;
//! for fork in &mut session.fork(3)? {
//!     assert_eq!(fork.invoke(&add("2"))?.text(), "42");
//! }
//! session.invoke(&add("1000"))?;
//! session.rollback("forty")?;
//! assert_eq!(session.invoke(&add("1"))?.text(), "41");
//! # Ok(())
//! # }
//! # #[cfg(not(feature = "wasm"))]
//! # fn main() {}
//! ```
//!
//! # Leases
//!
//! A lease is an instance in the warm state, which goes back to its pool when the lease is dropped.
//! It has three forms, for all kinds of guests:
//!
//! | taken by | type | for |
//! |---|---|---|
//! | [`Guest::lease`] | [`Lease`], which borrows the guest | calls in one function |
//! | [`Guest::lease_owned`] | [`OwnedLease`], which keeps the guest | other threads, `'static` tasks, fields of a struct |
//! | [`Guest::lease_async`] | [`AsyncLease`], whose calls are futures | tasks; no runtime is needed, and dropping a call ends it |
//!
//! [`LeaseError`] distinguishes an exhausted pool, a timeout of the wait for it, a guest that
//! fails, and a host that cannot make an instance.
//!
//! # Options
//!
//! [`Options`] of a guest, [`LeaseOptions`], [`CallOptions`] and [`SaveOptions`] are builders with
//! one method for each option. An option that a call does not set comes from its lease, then from
//! the guest, then from the default of the kind. A method whose name ends in `_with` takes options
//! of one call or one lease. In [`Options`], options of all kinds take precedence over those of one
//! kind (`Options::wasm`, `Options::vm`, `Options::linux`).
//!
//! # Features
//!
//! | feature | what it brings | by default |
//! |---|---|---|
//! | `wasm` | Wasm modules and components, on wasmtime | yes |
//! | `vm` | micro-VMs under KVM; x86-64 Linux only | |
//! | `linux` | unmodified Linux programs; Linux on x86-64 and arm64 | |
//! | `remote` | snapshots in object stores (`s3://`, `gs://`, `az://`) and OCI registries (`oci://`) | |
//! | `seal` | signed and sealed snapshots | |
//! | `arena` | private memory that is zero at every start | |
//! | `snapshots` | snapshots on disk and the pager, also without any guest; part of the first five | |
//!
//! On arm64 Linux `vm` selects nothing: the module `vm` is missing there, and
//! [`Kind::missing_reason`] names the processor. On other targets `vm` and `linux` fail the build.
//!
//! A feature compiles only its own kind of guest. The crate's README lists the number of crates of
//! each feature. `remote` and `seal` bring TLS and cryptography, so they are off by default.
//!
//! # The crates below
//!
//! Types in public signatures are re-exported here. The crates below are modules: [`memory`]
//! (images, slots, strategies), `snapshot` (trees of states), `wasm`, `vm`, `linux`, `arena`,
//! `frames`, `store`, `pager` and `pool`, each with its feature. [`Guest::as_module`] and similar
//! methods return their types.

#![cfg_attr(not(feature = "wasm"), allow(rustdoc::broken_intra_doc_links))]

// On arm64 Linux `vm` selects nothing, so that the command of afresh builds there with the same
// features. It builds for no other target, and the errors of missing names would not give the
// reason.
#[cfg(all(
    any(feature = "linux", feature = "vm"),
    not(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))
))]
compile_error!(
    "the features `linux` and `vm` of afresh need Linux on x86_64 or aarch64, and `vm` selects nothing on aarch64: build with `--no-default-features` and the features you need, such as `wasm`"
);

#[cfg(feature = "snapshots")]
mod error;
#[cfg(feature = "snapshots")]
mod found_snapshot;
#[cfg(feature = "guests")]
mod guests;
#[cfg(feature = "snapshots")]
mod options;
#[cfg(feature = "snapshots")]
mod place;
#[cfg(feature = "remote")]
mod remote;
#[cfg(all(feature = "snapshots", not(feature = "remote")))]
#[path = "remote_absent.rs"]
mod remote;

#[cfg(linux_guests)]
pub use afresh_linux as linux;
pub use afresh_memory as memory;
#[cfg(all(feature = "snapshots", shared_images))]
pub use afresh_pager::images::ImageClient;
#[cfg(vm_guests)]
pub use afresh_vm as vm;
#[cfg(feature = "wasm")]
pub use afresh_wasm as wasm;
#[cfg(feature = "arena")]
pub use {afresh_arena as arena, afresh_frames as frames};
#[cfg(feature = "guests")]
pub use {
    afresh_budget as budget,
    afresh_budget::{Budget as MemoryBudget, BudgetExceeded},
    afresh_files as files,
    afresh_files::{DirEntry, FileDifference, Refused, Stat, Tree},
    afresh_pool as pool,
    afresh_pool::{LimitPolicy, Limits, PoolStats},
    afresh_snapshot as snapshot,
    afresh_snapshot::{Difference, SnapshotId, SnapshotInfo, TreeError},
    guests::*,
};
#[cfg(feature = "snapshots")]
pub use {
    afresh_pager as pager,
    afresh_pager::SnapshotMemory,
    afresh_store as store,
    afresh_store::{Access, Encoding, Sha256, Snapshot, Store, TurnError},
    error::{Cause, OpenError, describe_error},
    found_snapshot::FoundSnapshot,
    options::Options,
    place::{LATEST, Place, Reference, ReferenceError},
};

#[cfg(feature = "remote")]
pub use afresh_store::remote::Remote;
#[cfg(feature = "seal")]
pub use afresh_store::seal::{PublicKey, SealKey, SigningKey};
