//! Runs AFL++'s own fuzzer on a program that its compiler has made.

use std::path::Path;
use std::process::{Command, Stdio};

use crate::{Failure, Score};

/// Fuzzes `program` for some seconds, and returns AFL++'s own count.
pub fn run(program: &Path, seeds: &[Vec<u8>], seed: u64, seconds: u64) -> Result<Score, Failure> {
    let folder = std::env::temp_dir().join(format!("afresh-aflpp-{}", std::process::id()));
    let (input, output) = (folder.join("in"), folder.join("out"));
    // An error means that another user has made it.
    std::fs::create_dir(&folder)?;
    std::fs::create_dir(&input)?;
    for (number, bytes) in seeds.iter().enumerate() {
        std::fs::write(input.join(number.to_string()), bytes)?;
    }
    let result = Command::new("afl-fuzz")
        .args(["-V", &seconds.to_string(), "-s", &(seed + 1).to_string(), "-i"])
        .arg(&input)
        .arg("-o")
        .arg(&output)
        .arg("--")
        .arg(program)
        // Settings of the host are not changed for a measurement.
        .env("AFL_SKIP_CPUFREQ", "1")
        .env("AFL_I_DONT_CARE_ABOUT_MISSING_CRASHES", "1")
        .env("AFL_NO_AFFINITY", "1")
        .env("AFL_NO_UI", "1")
        .stdin(Stdio::null())
        .output();
    let score = result.map_err(Failure::from).and_then(|ended| match ended.status.success() {
        true => score(&std::fs::read_to_string(output.join("default/fuzzer_stats"))?),
        false => Err(format!("afl-fuzz: {}: {}", ended.status, last_line(&ended.stdout)).into()),
    });
    std::fs::remove_dir_all(&folder)?;
    score
}

/// The last line that is not empty: AFL++ writes its reasons to standard output.
fn last_line(output: &[u8]) -> String {
    let text = String::from_utf8_lossy(output);
    text.lines().rfind(|line| !line.trim().is_empty()).unwrap_or("no message").trim().to_owned()
}

/// The score in a `fuzzer_stats`.
fn score(stats: &str) -> Result<Score, Failure> {
    let field = |name: &str| -> Result<f64, Failure> {
        let value = stats.lines().find_map(|line| {
            let (key, value) = line.split_once(':')?;
            (key.trim() == name).then(|| value.trim().parse())
        });
        Ok(value.ok_or_else(|| format!("fuzzer_stats has no {name}"))??)
    };
    Ok(Score {
        speed: field("execs_per_sec")?,
        kept: field("corpus_count")? as usize,
        crashes: field("saved_crashes")? as usize,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_names_the_last_message() {
        assert_eq!(
            last_line(b"banner\n[-] PROGRAM ABORT : no target\n\n"),
            "[-] PROGRAM ABORT : no target"
        );
        assert_eq!(last_line(b"\n"), "no message");
    }

    #[test]
    fn a_score_is_read_from_the_statistics() {
        let stats = "run_time          : 3\nexecs_per_sec     : 3446.85\ncorpus_count      : 113\n\
                     saved_crashes     : 0\n";
        let score = score(stats).unwrap();
        assert_eq!((score.speed, score.kept, score.crashes), (3446.85, 113, 0));
        let error = super::score("run_time : 3").unwrap_err();
        assert!(error.to_string().contains("execs_per_sec"), "{error}");
    }
}
