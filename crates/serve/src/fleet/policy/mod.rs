//! Decisions of the hosts of a fleet, without their communication: pure functions and state machines over numbers and
//! moments, which the property tests and the simulator drive as the server does.

mod failure_detector;
mod heartbeat_interval;
mod lease;
mod members;
mod placement;

pub use failure_detector::{FailureDetector, Verdict};
pub use heartbeat_interval::HeartbeatInterval;
pub use lease::{Lease, Terms};
pub use members::{Member, Members, NodeStatus};
pub use placement::{Placement, Seed};

/// A moment: time since some beginning that is the same for all moments of one host. It advances while the process is
/// stopped and while the machine sleeps.
pub type Moment = std::time::Duration;
