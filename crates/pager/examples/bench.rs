//! `cargo run --release -p afresh-pager --example bench -- [--quick] [--save] [CASE] [STRATEGY]…`

use afresh_pager::Strategy;
use afresh_pager::bench::{BenchOptions, restore, save};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut options = BenchOptions::default();
    let mut saving = false;
    for argument in std::env::args().skip(1) {
        match argument.as_str() {
            "--quick" => options = BenchOptions::quick(),
            "--save" => saving = true,
            name if name.parse::<Strategy>().is_ok() => {
                options.strategies.extend(name.parse::<Strategy>())
            }
            case => options.case = Some(case.to_owned()),
        }
    }
    let out = &mut std::io::stdout().lock();
    if saving {
        save(&options, out)?
    } else {
        restore(&options, out)?
    }
    Ok(())
}
