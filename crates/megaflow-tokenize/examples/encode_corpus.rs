//! Encodes the texts of JSONL files and prints MB of text per CPU second.
//!
//! ```text
//! encode_corpus TOKENIZER [--threads N] [--passes N] [--fresh N] [--ids OUT] FILE.jsonl ...
//! ```
//! The first pass is cold (an empty word cache), later ones are warm. `--fresh` makes N cold passes first, each with a new
//! encoder, and prints their mean: for texts too short for the clock. `--ids` writes all ids of a pass as u32, each
//! document ended by u32::MAX, to compare engines with.
#![allow(clippy::print_stdout, reason = "a command")]

use std::error::Error;
use std::io::Write as _;
use std::path::Path;
use std::time::Instant;

use megaflow_tokenize::{EncodeOptions, Tokenizer, TokenizerFiles};

/// CPU time of the whole process, in seconds.
fn cpu_seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/schedstat").unwrap_or_default();
    let own: f64 = stat.split_whitespace().next().and_then(|field| field.parse().ok()).unwrap_or(0.0);
    own / 1e9
}

/// CPU time of the calling thread, in seconds.
fn thread_cpu_seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    let own: f64 = stat.split_whitespace().next().and_then(|field| field.parse().ok()).unwrap_or(0.0);
    own / 1e9
}

fn texts(path: &str) -> Result<Vec<String>, Box<dyn Error>> {
    let mut texts = Vec::new();
    for line in std::fs::read_to_string(path)?.lines().filter(|line| !line.trim().is_empty()) {
        let record: serde_json::Value = serde_json::from_str(line)?;
        texts.extend(record["text"].as_str().map(str::to_owned));
    }
    Ok(texts)
}

/// Encodes all documents `count` times, each time with a new encoder, and prints the mean CPU time.
fn print_fresh_passes(tokenizer: &Tokenizer, documents: &[String], count: u32) -> Result<(), Box<dyn Error>> {
    let cpu = cpu_seconds();
    for _ in 0..count {
        let mut encoder = tokenizer.encoder(EncodeOptions::default())?;
        let mut ids = Vec::new();
        for document in documents {
            ids.clear();
            encoder.encode(document, &mut ids)?;
        }
    }
    println!("fresh {:.3} ms CPU a pass", (cpu_seconds() - cpu) * 1e3 / f64::from(count));
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let (mut threads, mut passes, mut fresh, mut ids_path, mut tokenizer_path) = (1usize, 3usize, 0u32, None, None);
    let mut documents = Vec::new();
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().ok_or("an option lacks its value");
        match argument.as_str() {
            "--threads" => threads = value()?.parse()?,
            "--passes" => passes = value()?.parse()?,
            "--fresh" => fresh = value()?.parse()?,
            "--ids" => ids_path = Some(value()?),
            _ if tokenizer_path.is_none() => tokenizer_path = Some(argument),
            _ => documents.extend(texts(&argument)?),
        }
    }
    let path = tokenizer_path.ok_or("name a tokenizer")?;
    let (start, cpu) = (Instant::now(), cpu_seconds());
    let tokenizer = TokenizerFiles::from_path(Path::new(&path))?.tokenizer;
    let load = (start.elapsed().as_secs_f64(), cpu_seconds() - cpu);
    let bytes: usize = documents.iter().map(String::len).sum();
    println!(
        "{} {} documents {bytes} bytes; load {:.3} s wall {:.3} s CPU",
        tokenizer.engine_kind().name(),
        documents.len(),
        load.0,
        load.1
    );
    if let Some(path) = ids_path {
        let mut encoder = tokenizer.encoder(EncodeOptions::default())?;
        let mut file = std::io::BufWriter::new(std::fs::File::create(path)?);
        let mut ids = Vec::new();
        for document in &documents {
            ids.clear();
            encoder.encode(document, &mut ids)?;
            ids.push(u32::MAX);
            for id in &ids {
                file.write_all(&id.to_le_bytes())?;
            }
        }
        file.flush()?;
    }
    if fresh > 0 {
        print_fresh_passes(&tokenizer, &documents, fresh)?;
    }
    let share = documents.len().div_ceil(threads).max(1);
    let results: Vec<Vec<(f64, f64, usize)>> = std::thread::scope(|scope| {
        let workers: Vec<_> = documents
            .chunks(share)
            .map(|documents| {
                let tokenizer = tokenizer.clone();
                scope.spawn(move || {
                    let Ok(mut encoder) = tokenizer.encoder(EncodeOptions::default()) else { return Vec::new() };
                    let mut ids = Vec::new();
                    (0..passes)
                        .map(|_| {
                            let (start, cpu, mut count) = (Instant::now(), thread_cpu_seconds(), 0);
                            for document in documents {
                                if ids.len() > 1 << 18 {
                                    count += ids.len();
                                    ids.clear();
                                }
                                let _ = encoder.encode(document, &mut ids);
                            }
                            count += ids.len();
                            ids.clear();
                            (start.elapsed().as_secs_f64(), thread_cpu_seconds() - cpu, count)
                        })
                        .collect()
                })
            })
            .collect();
        workers.into_iter().filter_map(|worker| worker.join().ok()).collect()
    });
    for pass in 0..passes {
        let wall = results.iter().map(|worker| worker[pass].0).fold(0.0, f64::max);
        let cpu: f64 = results.iter().map(|worker| worker[pass].1).sum();
        let count: usize = results.iter().map(|worker| worker[pass].2).sum();
        let megabytes = bytes as f64 / 1e6;
        println!(
            "{} {:6.1} MB/CPU-s {:6.1} MB/s wall {:6.2} Mtok/CPU-s",
            if pass == 0 { "cold" } else { "warm" },
            megabytes / cpu,
            megabytes / wall,
            count as f64 / 1e6 / cpu
        );
    }
    Ok(())
}
