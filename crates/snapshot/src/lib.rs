//! Internal crate of `afresh` (`afresh::snapshot`). Trees of snapshots, common to all guests:
//! freeze a guest, go to any frozen state, fork new guests from any of them.
//!
//! A [`Frozen`] state is an image of each memory and the guest's other state. Each image is
//! complete: it lists where every page is stored, and shares the storage of every page with the
//! states that have the same page. So there is no chain to walk: reading a page costs the same at
//! any depth, dropping a state in the middle of a branch leaves its descendants whole, and the
//! difference of any two states is found by comparing two lists. With a long history the length of
//! that list grows; past a budget a state is compacted into separate storage.
//!
//! [`Tree`] keeps states with their names and parents; [`Branch`] is a live guest that knows which
//! state it stands on; a [`Difference`] lists where two states differ. A guest takes part by
//! implementing [`Guest`]. The layers below a guest's files go with its states as a [`LayerImage`].
//! Its output has an [`OutputSource`].
//!
//! ```
//! use afresh_memory::{ImageBuilder, Slot, SlotConfig};
//! use afresh_snapshot::{Branch, Tree};
//!
//! let slot = Slot::new(&ImageBuilder::new(4).build()?, SlotConfig::default())?;
//! let mut branch = Branch::from_guest(&Tree::new(), slot)?;
//! branch.guest_mut()?.write(0, b"one")?;
//! let one = branch.checkpoint()?;
//! branch.guest_mut()?.write(0, b"two")?;
//!
//! branch.rollback(one)?;
//! let mut fork = branch.fork(one)?;
//! for guest in [branch.guest_mut()?, fork.guest_mut()?] {
//!     let mut bytes = [0; 3];
//!     guest.read(0, &mut bytes)?;
//!     assert_eq!(&bytes, b"one");
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod branch;
mod difference;
mod guest;
mod hold;
mod layers;
mod output;
mod tree;

pub use branch::{Branch, BranchError, GuestReserve};
pub use difference::Difference;
pub use guest::{Frozen, Guest, SlotGuestError};
pub use hold::StateHold;
pub use layers::{LayerImage, LayersError, SavedLayers};
pub use output::{OutputSource, OutputStream};
pub use tree::{SnapshotId, SnapshotInfo, Tree, TreeError};
