//! What the hosts of a fleet decide, apart from how they talk: pure functions and state machines over numbers and
//! moments, which the property tests and the simulator drive as the server does.

mod choice;
mod lease;
mod members;
mod pace;
mod suspicion;

pub use choice::{Choice, Seed};
pub use lease::{Lease, Terms};
pub use members::{Advert, Member, Members};
pub use pace::Pace;
pub use suspicion::{Suspicion, Verdict};

/// A moment: time since some beginning that is the same for all moments of one host. It goes on while the process is
/// stopped and while the machine sleeps.
pub type Moment = std::time::Duration;
