//! The crate's tests, in one program that is linked once.

mod borrowed_file;
mod common;
mod density;
mod fork;
mod lazy;
mod live_freeze;
mod mappings;
mod merging;
mod missing_features;
mod oracle;
mod prezeroed;
mod promises;
mod reclaim;
mod shortages;
mod tenants;
mod unprotected;
mod zeros;
