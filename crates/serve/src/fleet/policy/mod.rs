//! Decisions of the hosts of a fleet, without their communication: pure functions and state
//! machines over numbers and moments, which the property tests and the simulator drive as the
//! server does.

mod announcements;
mod bounds;
mod failure_detector;
mod heartbeat_groups;
mod heartbeat_interval;
mod lease;
mod members;
mod placement;
mod tenant_uses;

pub use afresh_sys::SplitMix64;
pub use announcements::Announcements;
pub use bounds::{MAX_HOST_NAME, bound_held, is_bounded, is_life};
pub use failure_detector::{FailureDetector, Verdict};
pub use heartbeat_groups::{Group, HeartbeatGroups, MAX_GROUP, place_tokens};
pub use heartbeat_interval::{HeartbeatCost, HeartbeatInterval, expiry};
pub use lease::{Lease, LeaseParameters};
pub use members::{Heartbeat, Member, Members, NodeStatus, set_digest};
pub use placement::Placement;
pub use tenant_uses::{KnownUses, MAX_REPORTED_TENANTS, TenantUse, TenantUses, UseReports};

/// A moment: time since some beginning that is the same for all moments of one host. It advances
/// while the process is stopped and while the machine sleeps.
pub type MonotonicTime = std::time::Duration;
