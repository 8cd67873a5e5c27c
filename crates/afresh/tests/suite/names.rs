//! Types of public signatures have names at the root of the crate.

use std::path::Path;

use afresh::{
    Access, Answer, AsyncLease, CallError, CallOptions, Checkpoint, Difference, Encoding,
    FileDifference, FoundSnapshot, Guest, InstanceDifference, Kind, Lease, LeaseError,
    LeaseOptions, LimitPolicy, Limits, OpenError, Options, Origin, OutputSource, OutputStream,
    OwnedLease, Place, PoolStats, Reference, ReferenceError, SaveError, SaveOptions, SavePoint,
    SavedSnapshot, SavedTurn, Session, SessionError, SessionFiles, Sha256, Snapshot, SnapshotId,
    SnapshotInfo, SnapshotMemory, Store, TreeError, Verification, VerifyError,
};

/// Compiles where each signature can be written with names of the root alone.
#[allow(dead_code, clippy::type_complexity, reason = "only the types matter")]
struct Signatures<'a> {
    open: fn(&'a Path, &'a Options) -> Result<Guest, OpenError>,
    lease: fn(&'a Guest) -> Result<Lease<'a>, LeaseError>,
    lease_with: fn(&'a Guest, &'a LeaseOptions) -> Result<Lease<'a>, LeaseError>,
    lease_owned: fn(&'a Guest) -> Result<OwnedLease, LeaseError>,
    pool: fn(&'a Guest) -> PoolStats,
    origin: fn(&'a Guest) -> Option<&'a Origin>,
    kind: fn(&'a Guest) -> Kind,
    call: fn(&'a mut Lease<'a>, &'a str, &'a [u8], &'a CallOptions) -> Result<Vec<u8>, CallError>,
    differences: fn(&'a mut Lease<'a>) -> Result<InstanceDifference, VerifyError>,
    into_inner: fn(AsyncLease) -> Option<OwnedLease>,
    save: fn(&'a Guest, &'a Reference, &'a SaveOptions) -> Result<SavedSnapshot, SaveError>,
    save_point: fn(&'a mut Session) -> Result<SavePoint, SaveError>,
    save_turn: fn(&'a mut Session, &'a Reference, &'a SaveOptions) -> Result<SavedTurn, SaveError>,
    tree: fn(&'a Session) -> Vec<SnapshotInfo>,
    checkpoint: fn(&'a mut Session, &'a str) -> Result<SnapshotId, SessionError>,
    rollback: fn(&'a mut Session, Checkpoint<'a>) -> Result<SnapshotId, SessionError>,
    diff: fn(&'a Session, &'a str, &'a str) -> Result<Difference, SessionError>,
    diff_files: fn(&'a Session, &'a str, &'a str) -> Result<FileDifference, SessionError>,
    files: fn(&'a mut Session) -> Result<SessionFiles<'a>, SessionError>,
    find: fn(&'a Reference, &'a Options) -> Result<FoundSnapshot, OpenError>,
    reference: fn(Place, &'a str) -> Result<Reference, ReferenceError>,
    store: fn(&'a Place) -> Result<Store, OpenError>,
    limits: fn(Options, Limits) -> Options,
    exhausted: fn(LeaseOptions, LimitPolicy) -> LeaseOptions,
    access: fn(Options, Access) -> Options,
    encoding: fn(SaveOptions, Encoding) -> SaveOptions,
    parts: (Answer, Verification, OutputSource, OutputStream, TreeError),
    saved: (Sha256, Snapshot, SnapshotMemory),
}

#[test]
fn a_signature_needs_no_name_of_a_crate_below() {
    let missing: Result<Guest, OpenError> =
        afresh::open(Path::new("/nonexistent.wasm"), &Options::new());
    assert!(missing.is_err());
    let missing: Result<FoundSnapshot, OpenError> =
        Reference::at("/nonexistent@home").find(&Options::new());
    assert!(missing.is_err());
    assert_eq!(Reference::at("/nonexistent@home").explicit_name(), None);
}

/// A path that is no text is a path all the same.
#[cfg(all(unix, feature = "wasm"))]
#[test]
fn a_path_that_is_no_text_can_be_opened() {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;

    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(OsStr::from_bytes(b"guest-\xff.wasm"));
    let wasm = wat::parse_str(r#"(module (func (export "one") (result i32) (i32.const 1)))"#);
    std::fs::write(&path, wasm.unwrap()).unwrap();
    let guest = afresh::open(&path, &Options::new()).unwrap();
    assert_eq!(guest.invoke(&afresh::Call::text("one", [""; 0])).unwrap().text(), "1");
    let to = Reference::at(dir.path().join(OsStr::from_bytes(b"saved-\xff@v1")));
    guest.save(&to, &SaveOptions::new()).unwrap();
    let Place::Directory(place) = to.place() else { panic!("{to:?}") };
    let again = afresh::open(place, &Options::new()).unwrap();
    assert_eq!(again.invoke(&afresh::Call::text("one", [""; 0])).unwrap().text(), "1");
}
