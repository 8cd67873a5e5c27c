//! Guests of any kind: opened, called, saved, and kept alive in sessions.

mod async_lease;
mod backend;
mod call;
mod call_cost;
mod call_options;
mod delta;
mod digest_base;
mod error;
mod guest;
#[cfg(feature = "seal")]
mod keys;
#[cfg(not(feature = "seal"))]
#[path = "guests/keys_absent.rs"]
mod keys;
mod lease;
mod lease_cost;
mod mark;
mod options;
mod reference_digest;
#[cfg(feature = "remote")]
mod remote_saves;
#[cfg(not(feature = "remote"))]
#[path = "guests/remote_saves_absent.rs"]
mod remote_saves;
mod save;
mod save_point;
mod saved_names;
mod session;
mod session_files;
mod session_turns;
mod temp_dir;
mod verification;
mod verify;

pub use afresh_snapshot::{OutputSource, OutputStream};
pub use async_lease::AsyncLease;
pub use backend::Kind;
#[cfg(linux_guests)]
pub use backend::{image_program, stored_program};
pub use call::{Answer, Call, Entry, Exit, Function};
pub use call_cost::CallCost;
pub use call_options::{CallOptions, LeaseOptions};
pub use error::{CallError, LeaseError, SaveError, SessionError, VerifyError};
pub use guest::{Guest, Origin, open};
pub use lease::{InstanceDifference, Lease, OwnedLease, StopHandle};
pub use mark::Mark;
pub(crate) use options::GuestOptions;
pub use save::{SaveOptions, SavedSnapshot};
pub use save_point::{SavePoint, SavePreparation};
pub use session::{Checkpoint, Session};
pub use session_files::{FileContent, SessionFiles};
pub use session_turns::SavedTurn;
pub use verification::{CloneRandomness, Verification};
