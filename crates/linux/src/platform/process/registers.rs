//! The registers of a thread that waits in the stub: the signal frame in the control area.

use super::Process;
use crate::platform::frame::{self, Context, Register, Registers};
use crate::platform::stub;

impl Process {
    fn frame(&self) -> usize {
        self.frame.expect("the guest waits in the stub")
    }

    /// A register of the guest, while it waits in the stub.
    pub(crate) fn register(&self, register: Register) -> u64 {
        self.control.read_word(self.frame() + register.offset())
    }

    pub(crate) fn set_register(&mut self, register: Register, value: u64) {
        let offset = self.frame() + register.offset();
        self.control.write_word(offset, value);
    }

    /// The frame of the guest that waits in the stub, and the bytes after it.
    pub(crate) fn frame_bytes(&self) -> Vec<u8> {
        let frame = self.frame();
        let mut bytes = vec![0; stub::CONTROL_LEN - frame];
        self.control.read(frame, &mut bytes);
        bytes
    }

    /// Writes into the frame. Only values that a guest may have in its registers: a mistake costs
    /// it its process.
    pub(crate) fn write_frame(&mut self, offset: usize, bytes: &[u8]) {
        let frame = self.frame();
        self.control.write(frame + offset, bytes);
    }

    /// Where the guest's process sees the frame.
    #[cfg_attr(target_arch = "aarch64", allow(dead_code, reason = "for x86-64"))]
    pub(crate) fn frame_address(&self) -> u64 {
        stub::CONTROL + self.frame() as u64
    }

    /// The registers of the thread that waits in the stub, to be put aside.
    pub(crate) fn context(&self) -> Context {
        Context { bytes: self.frame_bytes().into(), bases: self.bases }
    }

    /// Has another thread's registers in the stub. They are of this guest, and their frame is where
    /// all frames are.
    pub(crate) fn set_context(&mut self, context: &Context) {
        let offset = stub::CONTROL_LEN - context.bytes.len();
        self.control.write(offset, &context.bytes);
        self.frame = Some(offset);
        self.bases = context.bases;
    }

    /// Prepares the registers of a program that starts.
    pub(crate) fn set_start(&mut self, entry: u64, stack: u64) {
        self.control.write(frame::START, &frame::start(entry, stack));
        self.frame = Some(frame::START);
    }

    /// Forgets where the frame of a start was: the kernel chooses where those of signals are.
    pub(crate) fn forget_frame(&mut self) {
        self.frame = None;
    }

    /// The registers of the guest, while it waits in the stub.
    pub(crate) fn registers(&self) -> Registers {
        let mut stack = vec![0; stub::SIGNAL_STACK_LEN];
        self.control.read(stub::ORDERS_LEN, &mut stack);
        Registers { stack, frame: self.frame(), bases: self.bases }
    }

    /// Sets the registers that it returns to.
    pub(crate) fn set_registers(&mut self, registers: &Registers) {
        self.control.write(stub::ORDERS_LEN, &registers.stack);
        self.frame = Some(registers.frame);
        self.bases = registers.bases;
    }

    /// Whether the orders are wiped and the signal stack holds `registers`.
    pub(crate) fn control_equals(&self, registers: &Registers) -> bool {
        let mut orders = vec![0; stub::ORDERS_LEN];
        self.control.read(0, &mut orders);
        orders.iter().all(|&byte| byte == 0) && self.registers() == *registers
    }
}
