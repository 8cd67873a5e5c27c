//! The receipts that tie a question of the stub to the orders before it.

use afresh_sys::host::random_word;

/// Words that a guest cannot guess, one for each piece of orders.
#[derive(Debug)]
pub(super) struct ReceiptSource(u64);

impl ReceiptSource {
    pub(super) fn new() -> Self {
        Self(random_word())
    }

    pub(super) fn next(&mut self) -> u64 {
        // Never the result of a handler, which has executed nothing.
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15).max(1);
        self.0
    }
}

/// Arguments of the question that follows orders.
#[derive(Clone, Copy)]
pub(super) struct ExpectedReceipt {
    pub(super) receipt: u64,
    /// Where the frame is in the control area.
    pub(super) frame: usize,
}
