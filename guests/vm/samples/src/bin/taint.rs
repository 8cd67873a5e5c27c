//! Leaves all state behind that a program at privilege level 3 can, and reports the state at its
//! own start: for tests that compare the two. The first byte of the input says what to leave; the
//! output is always what the processor held at the first instruction of the call.
//!
//! | bytes | what they hold |
//! |---|---|
//! | 0..128 | RAX, RBX, RCX, RDX, RSI, RDI, RBP, RSP, R8 to R15 |
//! | 128..136 | RFLAGS |
//! | 136..184 | CS, DS, ES, FS, GS, SS, a word each |
//! | 184..200 | the bytes at the address of `MAGIC`, through FS and of GS |
//! | 200..216 | XCR0, and which of its components are in use, if there is XSAVE |
//! | 256.. | the extended state as XSAVE, or FXSAVE, stores it |
#![no_std]
#![no_main]
extern crate alloc;

use core::arch::{asm, naked_asm};

use afresh_guest::abi::{BootInfo, CALL_DONE, CALL_GENERATION, PORT};

const LEN: usize = 256 + 4096;

#[repr(C, align(64))]
struct Secret([u8; LEN]);

static mut FOUND: Secret = Secret([0; LEN]);
/// Room for string instructions on ports to read into and write from.
#[repr(C, align(4096))]
struct Room([u32; 8192]);

static mut ROOM: Room = Room([0; 8192]);
static MAGIC: u64 = 0x1234_5678_9abc_def0;
static mut XSAVE: u8 = 0;

#[unsafe(no_mangle)]
extern "C" fn _start(boot: *const BootInfo) -> ! {
    fn init() {
        let features: u32;
        // SAFETY: CPUID changes nothing but the registers named.
        unsafe {
            asm!("push rbx", "cpuid", "pop rbx", inout("eax") 1 => _, out("ecx") features, out("edx") _);
            XSAVE = (features >> 27 & 1) as u8;
        }
    }
    // SAFETY: the host passes the boot page.
    unsafe { afresh_guest::ready(boot, init, enter) }
}

/// Stores the initial state before anything changes it, then continues to `act` as if that had been
/// called.
#[unsafe(naked)]
extern "C" fn enter(_input: *const u8, _len: usize) -> ! {
    naked_asm!(
        "mov qword ptr [rip + {found}], rax",
        "mov qword ptr [rip + {found} + 8], rbx",
        "mov qword ptr [rip + {found} + 16], rcx",
        "mov qword ptr [rip + {found} + 24], rdx",
        "mov qword ptr [rip + {found} + 32], rsi",
        "mov qword ptr [rip + {found} + 40], rdi",
        "mov qword ptr [rip + {found} + 48], rbp",
        "mov qword ptr [rip + {found} + 56], rsp",
        "mov qword ptr [rip + {found} + 64], r8",
        "mov qword ptr [rip + {found} + 72], r9",
        "mov qword ptr [rip + {found} + 80], r10",
        "mov qword ptr [rip + {found} + 88], r11",
        "mov qword ptr [rip + {found} + 96], r12",
        "mov qword ptr [rip + {found} + 104], r13",
        "mov qword ptr [rip + {found} + 112], r14",
        "mov qword ptr [rip + {found} + 120], r15",
        "pushfq",
        "pop rax",
        "mov qword ptr [rip + {found} + 128], rax",
        "mov word ptr [rip + {found} + 136], cs",
        "mov word ptr [rip + {found} + 144], ds",
        "mov word ptr [rip + {found} + 152], es",
        "mov word ptr [rip + {found} + 160], fs",
        "mov word ptr [rip + {found} + 168], gs",
        "mov word ptr [rip + {found} + 176], ss",
        "lea rcx, [rip + {magic}]",
        "mov rax, qword ptr fs:[rcx]",
        "mov qword ptr [rip + {found} + 184], rax",
        "mov rax, qword ptr gs:[rcx]",
        "mov qword ptr [rip + {found} + 192], rax",
        "cmp byte ptr [rip + {has_xsave}], 0",
        "je 2f",
        "xor ecx, ecx",
        "xgetbv",
        "mov dword ptr [rip + {found} + 200], eax",
        "mov dword ptr [rip + {found} + 204], edx",
        "mov eax, -1",
        "mov edx, -1",
        "xsave64 [rip + {found} + 256]",
        "jmp {act}",
        "2:",
        "fxsave64 [rip + {found} + 256]",
        "jmp {act}",
        found = sym FOUND,
        magic = sym MAGIC,
        has_xsave = sym XSAVE,
        act = sym act,
    )
}

/// Fills the general registers with values that must not be seen again, points RDI and RSI to
/// memory that may be written and DX to the port, runs the given lines, and ends the call if that
/// is still possible.
macro_rules! leave {
    ($($line:expr),* $(,)?) => {
        asm!(
            "mov rbx, 0x5ec2e7005ec2e700",
            "mov rbp, rbx",
            "mov r8, rbx",
            "mov r9, rbx",
            "mov r10, rbx",
            "mov r11, rbx",
            "mov r12, rbx",
            "mov r13, rbx",
            "mov r14, rbx",
            "mov r15, rbx",
            "mov eax, 0x5ec2e7",
            "mov ecx, 5000",
            "mov edx, {port}",
            "lea rdi, [rip + {room} + 4092]",
            "lea rsi, [rip + {room}]",
            $($line,)*
            "mov eax, {done}",
            "mov edi, 0",
            "lea rsi, [rip + {found}]",
            "mov edx, {len}",
            "out {port}, eax",
            "ud2",
            port = const PORT,
            done = const CALL_DONE,
            len = const LEN,
            room = sym ROOM,
            found = sym FOUND,
            options(noreturn),
        )
    };
}

extern "C" fn act(input: *const u8, len: usize) -> ! {
    let what = if len > 0 {
        // SAFETY: the host passes the input buffer and how much of it is filled.
        unsafe { *input }
    } else {
        b' '
    };
    // SAFETY: this guest needs none of the changed state; the host contains every effect.
    unsafe {
        match what {
            // Ports. The bitmap that allows `out` allows the rest of them.
            b'i' => leave!("in eax, dx"),
            b'I' => leave!("in eax, 0xa8"),
            b'b' => leave!("in al, dx"),
            b'w' => leave!("in ax, dx"),
            b'j' => leave!("insd"),
            b'J' => leave!("rep insd"),
            b'l' => leave!("std", "insb"),
            // Into unmapped memory: the completion faults.
            b'z' => leave!("mov edi, 64", "insd"),
            b'Z' => leave!("lea rdi, [rip + {found} - 0x1000000]", "rep insd"),
            b'B' => leave!("out dx, al"),
            b'W' => leave!("mov edx, 0xa9", "out dx, al"),
            b'o' => leave!("outsd"),
            b'O' => {
                for index in 0..8192 {
                    (&raw mut ROOM).cast::<u32>().add(index).write_volatile(CALL_GENERATION);
                }
                leave!("rep outsd")
            }
            // The call ends, well, by a string of ports: its output begins behind the string.
            b'D' => {
                (&raw mut ROOM).cast::<u32>().write_volatile(CALL_DONE);
                leave!("xor edi, edi", "outsd")
            }
            // Flags: AC, DF, NT, ID, and those of arithmetic; then the one that steps.
            b'f' => leave!("push 0x244ed5", "popfq"),
            b't' => leave!("push 0x102", "popfq", "nop", "nop"),
            b'T' => leave!(
                "mov eax, {done}",
                "xor edi, edi",
                "lea rsi, [rip + {found}]",
                "mov edx, {len}",
                "push 0x102",
                "popfq",
                "out {port}, eax"
            ),
            b'U' => leave!(
                "mov eax, {done}",
                "xor edi, edi",
                "lea rsi, [rip + {found}]",
                "mov edx, {len}",
                "mov ebx, ss",
                "push 0x102",
                "popfq",
                "mov ss, bx",
                "out {port}, eax"
            ),
            b'r' => leave!(
                "mov ecx, ss",
                "lea rbx, [rip + 4f]",
                "mov rbp, rsp",
                "push rcx",
                "push rbp",
                "push 0x254ed7",
                "mov ecx, cs",
                "push rcx",
                "push rbx",
                "iretq",
                "4:"
            ),
            // Segments.
            b's' => leave!("xor eax, eax", "mov ds, ax", "mov es, ax", "mov fs, ax", "mov gs, ax"),
            b'c' => leave!("mov eax, cs", "mov ds, ax", "mov es, ax", "mov fs, ax", "mov gs, ax"),
            b'S' => leave!(
                "mov eax, {done}",
                "xor edi, edi",
                "lea rsi, [rip + {found}]",
                "mov edx, {len}",
                "mov ebx, ss",
                "mov ss, bx",
                "out {port}, eax"
            ),
            b'g' => leave!("mov rax, rdi", "wrfsbase rax"),
            b'G' => leave!("mov rax, rdi", "wrgsbase rax"),
            b'0' => leave!("mov eax, 0x40", "mov fs, ax"),
            // Extended state: x87 with its pointers and control words, SSE, AVX, AVX-512, AMX,
            // keys.
            b'x' => leave!(
                "fld1",
                "fldpi",
                "fldz",
                "fdivp",
                "fild dword ptr [rsi]",
                "mov dword ptr [rdi], 0x0c7f",
                "fldcw [rdi]",
                "mov dword ptr [rdi], 0x7f80",
                "ldmxcsr [rdi]",
                "pcmpeqd xmm0, xmm0",
                "movdqa xmm7, xmm0",
                "movdqa xmm15, xmm0"
            ),
            b'm' => leave!("movq mm3, rbx"),
            b'y' => leave!(
                "pcmpeqd xmm0, xmm0",
                "vinsertf128 ymm0, ymm0, xmm0, 1",
                "vmovaps ymm7, ymm0",
                "vmovaps ymm15, ymm0"
            ),
            b'Y' => leave!(
                "vpternlogd zmm0, zmm0, zmm0, 255",
                "vmovaps zmm7, zmm0",
                "vmovaps zmm16, zmm0",
                "vmovaps zmm31, zmm0",
                "kxnorw k1, k1, k1",
                "kmovw k7, k1"
            ),
            b'a' => leave!("mov rcx, rdi", "mov byte ptr [rdi], 1", "ldtilecfg [rdi]"),
            b'k' => leave!("xor ecx, ecx", "xor edx, edx", "mov eax, 0x55555554", "wrpkru"),
            b'X' => leave!("xor ecx, ecx", "xor edx, edx", "mov eax, 3", "xsetbv"),
            // Instructions that the processor or KVM may answer in different ways.
            b'v' => leave!("mov eax, 12", "vmcall"),
            b'V' => leave!("mov eax, 12", "vmmcall"),
            b'q' => leave!("rdtscp", "rdtsc"),
            b'p' => leave!(".byte 0xf3, 0x0f, 0xc7, 0xf8"), // rdpid rax
            b'P' => leave!("mov ecx, 0", "rdpmc"),
            b'M' => leave!(
                ".byte 0xf3, 0x0f, 0xae, 0xf7",
                "mov eax, 100000",
                "xor edx, edx",
                ".byte 0xf2, 0x0f, 0xae, 0xf1"
            ), // umonitor rdi, umwait ecx
            b'R' => leave!("rdrand rax", "rdseed rbx"),
            b'h' => leave!("hlt"),
            b'3' => leave!("int3"),
            b'1' => leave!(".byte 0xf1"),
            b'u' => leave!("ud2"),
            b'd' => leave!("xor edx, edx", "xor ecx, ecx", "div ecx"),
            b'n' => leave!("mov eax, 16", "mov [rax], rax"),
            b'L' => leave!("5:", "pcmpeqd xmm9, xmm9", "jmp 5b"),
            b'K' => leave!("syscall"),
            b'E' => leave!("sysenter"),
            b'8' => leave!("int 0x80"),
            b'C' => leave!("mov rax, cr0"),
            b'7' => leave!("mov rax, dr7"),
            _ => leave!("nop"),
        }
    }
}
