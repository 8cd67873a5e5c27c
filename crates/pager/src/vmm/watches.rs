//! The watches of a VMM: at most one that lives, and why the last ones are over.
//!
//! A *watch* is one write protection of the memory, from `prepare` or `freeze` on. Several control
//! clients can act on one VMM, so each names the watch that it means.
//!
//! Promises: no two watches of this process have the same number. A request that names a watch
//! never reaches another. The record of those that are over is bounded.

use std::collections::VecDeque;

use super::request_error::RequestError;
use super::watch::Watch;
use super::watch_end::{WatchEnd, WatchId};

/// Watches whose end is remembered.
const MAX_ENDED: usize = 16;

/// The watches of a VMM.
#[derive(Debug, Default)]
pub(super) struct Watches {
    live: Option<Watch>,
    /// The oldest first.
    ended: VecDeque<(WatchId, WatchEnd)>,
}

impl Watches {
    /// Begins a watch, after the last one is over.
    pub(super) fn begin(&mut self, watch: Watch) {
        debug_assert!(self.live.is_none());
        self.live = Some(watch);
    }

    pub(super) fn live(&self) -> Option<&Watch> {
        self.live.as_ref()
    }

    pub(super) fn live_mut(&mut self) -> Option<&mut Watch> {
        self.live.as_mut()
    }

    /// The watch of this number.
    ///
    /// # Errors
    /// [`RequestError::WatchOver`].
    pub(super) fn get(&mut self, id: WatchId) -> Result<&mut Watch, RequestError> {
        let ended = self.ended.iter().find(|(ended, _)| *ended == id);
        let why = ended.map_or(WatchEnd::Unknown, |(_, why)| *why);
        let live = self.live.as_mut().filter(|watch| watch.id == id);
        live.ok_or(RequestError::WatchOver { watch: id, why })
    }

    /// The watch of this number, which is not frozen.
    ///
    /// # Errors
    /// [`RequestError::WatchOver`], [`RequestError::Frozen`].
    pub(super) fn unfrozen(&mut self, id: WatchId) -> Result<&mut Watch, RequestError> {
        let watch = self.get(id)?;
        if watch.is_frozen() { Err(RequestError::Frozen(id)) } else { Ok(watch) }
    }

    /// The frozen watch of this number, whose image is whole so far.
    ///
    /// # Errors
    /// [`RequestError::WatchOver`], [`RequestError::NotFrozen`], [`RequestError::Lost`].
    pub(super) fn frozen(&mut self, id: WatchId) -> Result<&mut Watch, RequestError> {
        let watch = self.get(id)?;
        match watch.loss() {
            _ if !watch.is_frozen() => Err(RequestError::NotFrozen(id)),
            Some(loss) => Err(RequestError::Lost(loss)),
            None => Ok(watch),
        }
    }

    /// The watch that is frozen.
    pub(super) fn frozen_id(&self) -> Option<WatchId> {
        self.live.as_ref().filter(|watch| watch.is_frozen()).map(|watch| watch.id)
    }

    /// Ends the watch of this number. Returns whether it was there.
    pub(super) fn end(&mut self, id: WatchId, why: WatchEnd) -> bool {
        self.live.as_ref().is_some_and(|watch| watch.id == id) && self.end_live(why)
    }

    /// Ends the watch that lives. Returns whether there was one.
    pub(super) fn end_live(&mut self, why: WatchEnd) -> bool {
        let Some(watch) = self.live.take() else { return false };
        if self.ended.len() == MAX_ENDED {
            self.ended.pop_front();
        }
        self.ended.push_back((watch.id, why));
        true
    }
}
