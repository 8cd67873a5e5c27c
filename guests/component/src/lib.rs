//! A small WASI 0.2 component, to try components on: a ledger of accounts and a buffer, both in its
//! linear memory. The interface is `wit/world.wit`.
//!
//! `warm` fills the ledger; until then there are no accounts and the buffer is empty.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::hint::black_box;

// The generated items are public and carry the documentation of the WIT file only.
#[allow(missing_docs, clippy::undocumented_unsafe_blocks, unsafe_op_in_unsafe_fn)]
mod bindings {
    wit_bindgen::generate!({ path: "wit", world: "ledger" });
    export!(Ledger with_types_in self);
    use super::Ledger;
}

const ACCOUNTS: u32 = 50_000;
const BUFFER: usize = 4 << 20;
const PAGE: usize = 4096;

struct Account {
    name: String,
    balance: u64,
}

struct State {
    accounts: BTreeMap<u32, Account>,
    buffer: Vec<u8>,
    calls: u64,
}

thread_local! {
    static STATE: RefCell<State> =
        const { RefCell::new(State { accounts: BTreeMap::new(), buffer: Vec::new(), calls: 0 }) };
}

/// Counts the call and hands it the state.
fn call<T>(body: impl FnOnce(&mut State) -> T) -> T {
    STATE.with_borrow_mut(|state| {
        state.calls += 1;
        body(state)
    })
}

struct Ledger;

impl bindings::Guest for Ledger {
    fn warm() {
        let accounts = (0..ACCOUNTS)
            .map(|id| {
                // A fixed, scattered sequence, so that every build of the ledger is the same.
                let mixed = id.wrapping_mul(0x9e37_79b1);
                (
                    id,
                    Account {
                        name: format!("account {mixed:08x}"),
                        balance: u64::from(mixed % 1000),
                    },
                )
            })
            .collect();
        STATE.set(State { accounts, buffer: vec![0; BUFFER], calls: 0 });
    }

    fn deposit(account: u32) -> Option<u64> {
        call(|state| {
            let account = state.accounts.get_mut(&account)?;
            account.balance += 1;
            Some(account.balance)
        })
    }

    fn search(part: String, limit: u32) -> Vec<String> {
        call(|state| {
            let names = state.accounts.values().map(|account| &account.name);
            names.filter(|name| name.contains(&part)).take(limit as usize).cloned().collect()
        })
    }

    fn fill(pages: u32, value: u8) -> u32 {
        call(|state| {
            let have = state.buffer.len() / PAGE;
            let pages = (pages as usize).min(have);
            let stride = have.checked_div(pages).unwrap_or(0);
            for page in 0..pages {
                let start = page * stride * PAGE;
                state.buffer[start..start + PAGE].fill(value);
            }
            pages as u32
        })
    }

    fn digest() -> u64 {
        STATE.with_borrow(|state| {
            // FNV-1a, 64 bits.
            let mut digest = 0xcbf2_9ce4_8422_2325_u64;
            let mut mix =
                |byte: u8| digest = (digest ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
            for (id, account) in &state.accounts {
                id.to_le_bytes().into_iter().for_each(&mut mix);
                account.name.bytes().for_each(&mut mix);
                account.balance.to_le_bytes().into_iter().for_each(&mut mix);
            }
            state.buffer.iter().copied().for_each(&mut mix);
            state.calls.to_le_bytes().into_iter().for_each(&mut mix);
            digest
        })
    }

    fn calls() -> u64 {
        STATE.with_borrow(|state| state.calls)
    }

    fn random() -> u64 {
        call(|_| RandomState::new().hash_one(0u8))
    }

    fn fail() {
        call(|state| state.buffer.fill(0xff));
        core::arch::wasm32::unreachable()
    }

    fn spin() {
        call(|state| {
            loop {
                state.calls = black_box(state.calls.wrapping_add(1));
            }
        })
    }
}
