//! Why a value was refused.

use afresh_budget::BudgetExceeded;

use crate::tag::MAX_DEPTH;

/// Why a value was refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DecodeError {
    /// The bytes are not CBOR, or not of the expected kind.
    #[error("the guest's value cannot be decoded: {0}")]
    Damaged(#[from] minicbor::decode::Error),
    /// Its objects exceed a budget.
    #[error("the value takes more memory than its budget, {limit} bytes")]
    TooLarge {
        /// The budget.
        limit: usize,
    },
    /// It has too many levels.
    #[error("the value of the guest is nested deeper than {MAX_DEPTH} levels")]
    TooDeep,
    /// CBOR that is not a value.
    #[error("the guest's bytes are not a value")]
    NotValue,
    /// A list or map of unknown length.
    #[error("a length is missing in the guest's value")]
    NoLength,
    /// Packed numbers with a part of one.
    #[error("packed numbers in the guest value are cut off")]
    CutNumbers,
    /// A UUID of another length.
    #[error("a UUID in the guest value does not have 16 bytes")]
    CutUuid,
    /// A tag without a meaning here.
    #[error("the guest's value has parts of an unknown kind (tag {0})")]
    UnknownTag(u64),
}

impl From<BudgetExceeded> for DecodeError {
    fn from(exceeded: BudgetExceeded) -> Self {
        Self::TooLarge { limit: exceeded.limit }
    }
}
