//! Takes a JSON array of objects; returns one object: how many there are, and the sum of every
//! field that holds numbers.
#![no_std]
#![no_main]
extern crate alloc;

use alloc::collections::BTreeMap;
use alloc::string::String;
use alloc::vec::Vec;
use serde_json::{Map, Value, json};

fn init() {}

fn call(input: &[u8]) -> Vec<u8> {
    let rows: Vec<Map<String, Value>> = match serde_json::from_slice(input) {
        Ok(rows) => rows,
        Err(error) => panic!("input is not an array of objects: {error}"),
    };
    let mut sums: BTreeMap<&str, f64> = BTreeMap::new();
    for (name, value) in rows.iter().flatten() {
        if let Some(number) = value.as_f64() {
            *sums.entry(name).or_default() += number;
        }
    }
    let output = json!({ "rows": rows.len(), "sums": sums });
    serde_json::to_vec(&output).unwrap_or_default()
}

afresh_guest::guest!(init, call);
