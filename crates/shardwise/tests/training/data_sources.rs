//! Data larger than memory, several sources with weights, texts to tokens.
//!
//! `SHARDWISE_DATA_PLANS` sets the number of plans of kill and resume (default 200), `SHARDWISE_DATA_SEED` the first seed;
//! `SHARDWISE_TOKEN_FILE_PART` the part of the large file that is read (default 16: a sixteenth; 1 takes about half a minute).

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use candle_core::{Device, Tensor};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use shardwise::checkpoint;
use shardwise::data::{
    Batches, Dataset, Mixture, SampleOrder, Texts, TokenFile, TokenFileWriter, TokenSequences, Tokenization, data_files,
};
use shardwise::prelude::*;
use shardwise::text::Tokenizer;
use shardwise_test_suites::own_process::is_alone;
use shardwise_test_suites::process_memory::process_memory;
use shardwise_test_suites::scratch::Scratch;
use shardwise_test_suites::settings::env_or;

/// Samples that say which source and which index they are.
#[derive(Debug, Clone)]
struct Source {
    number: i64,
    count: usize,
}

impl Dataset for Source {
    fn len(&self) -> usize {
        self.count
    }

    fn sample(&self, index: usize) -> Result<Vec<Tensor>> {
        assert!(index < self.count);
        Ok(vec![Tensor::new(&[self.number, index as i64], &Device::Cpu)?])
    }
}

/// Sources, weights, seed of the shuffle, and the parts of a run.
struct Plan {
    sources: Vec<Source>,
    weights: Option<Vec<f64>>,
    shuffle: Option<u64>,
    parts: Vec<PlanPart>,
}

/// A part of a run until it is killed.
struct PlanPart {
    mesh: Mesh,
    batch: usize,
    /// Batches until the checkpoint that the next part resumes from.
    kept: usize,
    /// Batches after it, which are lost.
    lost: usize,
}

const RANKS: usize = 6;

impl Plan {
    fn random(seed: u64) -> Plan {
        let mut rng = StdRng::seed_from_u64(seed);
        let sources = (0..rng.random_range(1..5)).map(|number| Source { number, count: rng.random_range(1..40) });
        let sources: Vec<Source> = sources.collect();
        let weights = rng.random_bool(0.7).then(|| sources.iter().map(|_| rng.random_range(0.05..1.0)).collect());
        let shuffle = rng.random_bool(0.7).then(|| rng.random());
        let part = |_| {
            let (dp, tp) = [(1, 1), (2, 1), (3, 1), (2, 2), (1, 2), (4, 1), (3, 2), (6, 1)][rng.random_range(0..8)];
            // The first rank compares; the other ones of the mesh may be any.
            let mut rest: Vec<usize> = (1..RANKS).collect();
            let mut ranks = vec![0];
            while ranks.len() < dp * tp {
                ranks.push(rest.swap_remove(rng.random_range(0..rest.len())));
            }
            let mesh = Mesh::from_ranks([("dp", dp), ("tp", tp)], ranks).unwrap();
            let (kept, lost) = (rng.random_range(0..6), rng.random_range(0..3));
            PlanPart { mesh, batch: rng.random_range(1..9), kept, lost }
        };
        Plan { parts: (0..4).map(part).collect(), sources, weights, shuffle }
    }

    fn batches(&self, mesh: &DeviceMesh, batch: usize) -> Result<Batches<Mixture<Source>>> {
        let mixture = match &self.weights {
            Some(weights) => Mixture::weighted(self.sources.iter().cloned().zip(weights.iter().copied()))?,
            None => Mixture::concatenated(self.sources.clone())?,
        };
        let batches = Batches::new(mixture, mesh)?.batch(batch).sharded("dp")?;
        Ok(match self.shuffle {
            Some(seed) => batches.shuffle(seed),
            None => batches,
        })
    }
}

fn drawn(batches: &mut Batches<Mixture<Source>>, count: usize) -> Result<Vec<(i64, i64)>> {
    let mut all = Vec::new();
    for _ in 0..count {
        let batch = batches.next_batch()?[0].full_tensor()?.to_vec2::<i64>()?;
        all.extend(batch.into_iter().map(|sample| (sample[0], sample[1])));
    }
    Ok(all)
}

#[test]
fn runs_that_are_killed_and_resumed_on_other_meshes_lose_and_repeat_no_sample() {
    let (plans, first): (u64, u64) = (env_or("SHARDWISE_DATA_PLANS", 200), env_or("SHARDWISE_DATA_SEED", 0));
    launch(RANKS, move |world| {
        for seed in first..first + plans {
            let plan = Plan::random(seed);
            let (mut position, mut all) = (0, Vec::new());
            for PlanPart { mesh, batch, kept, lost } in &plan.parts {
                let is_inside = mesh.contains(world.rank());
                let mesh = world.device_mesh(mesh.clone())?;
                let mut batches = plan.batches(&mesh, *batch)?;
                batches.seek(position);
                if is_inside {
                    all.extend(drawn(&mut batches, *kept)?);
                    assert_eq!(batches.position(), position + (batch * kept) as u64, "seed {seed}");
                    drawn(&mut batches, *lost)?;
                }
                position += (batch * kept) as u64;
            }
            if world.rank() != 0 {
                continue;
            }
            // What one rank draws without being killed.
            let alone = plan.batches(&world.device_mesh(Mesh::from_ranks([("dp", 1)], vec![0])?)?, 1)?;
            let mixture = |at: u64| alone.order().sample(at) as usize;
            let ends: Vec<usize> = plan
                .sources
                .iter()
                .scan(0, |end, source| {
                    *end += source.count;
                    Some(*end)
                })
                .collect();
            let expected: Vec<(i64, i64)> = (0..position)
                .map(|at| {
                    let (sample, source) = (mixture(at), ends.partition_point(|&end| end <= mixture(at)));
                    (source as i64, (sample - (ends[source] - plan.sources[source].count)) as i64)
                })
                .collect();
            assert_eq!(all, expected, "seed {seed}");
            // Every source, or all of them together without weights, has each of its samples once per epoch.
            let groups: Vec<Vec<Source>> = match plan.weights {
                Some(_) => plan.sources.iter().map(|source| vec![source.clone()]).collect(),
                None => vec![plan.sources.clone()],
            };
            for (group, count) in groups.iter().zip(alone.order().drawn(position)) {
                let own = |(source, _): &&(i64, i64)| group.iter().any(|own| own.number == *source);
                let samples: Vec<(i64, i64)> = all.iter().filter(own).copied().collect();
                assert_eq!(samples.len() as u64, count, "seed {seed}");
                let mut every: Vec<(i64, i64)> =
                    group.iter().flat_map(|own| (0..own.count as i64).map(|index| (own.number, index))).collect();
                every.sort_unstable();
                for epoch in samples.chunks(every.len()) {
                    let mut epoch = epoch.to_vec();
                    epoch.sort_unstable();
                    let whole = epoch.len() == every.len();
                    epoch.dedup();
                    assert!(
                        if whole { epoch == every } else { epoch.len() == samples.len() % every.len() },
                        "seed {seed}"
                    );
                }
            }
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_checkpoint_keeps_the_position_in_a_mixture_and_refuses_other_weights() {
    let place = Scratch::new("sources-mixture");
    let path = place.0.join("state");
    launch(2, move |world| {
        let mesh = world.mesh([("dp", 2)])?;
        let sources = [Source { number: 0, count: 9 }, Source { number: 1, count: 30 }];
        let batches = |weights: [f64; 2]| {
            let mixture = Mixture::weighted(sources.clone().into_iter().zip(weights))?;
            Batches::new(mixture, &mesh)?.shuffle(4).batch(6).sharded("dp")
        };
        let mut first = batches([0.5, 0.5])?;
        drawn(&mut first, 3)?;
        checkpoint::save_from(&world, &path, (&first,))?;
        let expected = drawn(&mut first, 4)?;
        let mut again = batches([2.0, 2.0])?;
        checkpoint::load_into(&world, &path, (&mut again,))?;
        assert_eq!(drawn(&mut again, 4)?, expected);
        let mut other = batches([0.6, 0.4])?;
        let error = checkpoint::load_into(&world, &path, (&mut other,)).unwrap_err().to_string();
        assert!(error.contains("samples") && error.contains("2048"), "{error}");
        assert_eq!(other.position(), 0);
        // Without weights there is one source of all samples.
        let all = Mixture::concatenated(sources.clone())?;
        let mut other = Batches::new(all, &mesh)?.shuffle(4).batch(6);
        assert!(checkpoint::load_into(&world, &path, (&mut other,)).unwrap_err().to_string().contains("samples"));
        Ok(())
    })
    .unwrap();
}

#[test]
fn weights_inside_of_weights_are_refused() {
    let source = |number, count| Source { number, count };
    let inner = || Mixture::weighted([(source(0, 3), 1.0), (source(1, 4), 2.0)]).unwrap();
    let error = Mixture::weighted([(inner(), 1.0), (inner(), 1.0)]).unwrap_err().to_string();
    assert!(error.contains("a mixture as source 0"), "{error}");
    assert!(Mixture::concatenated([inner()]).is_err());
    // One after the other has no weights that could be lost.
    let plain = || Mixture::concatenated([source(0, 3), source(1, 4)]).unwrap();
    let both = Mixture::weighted([(plain(), 1.0), (plain(), 3.0)]).unwrap();
    assert_eq!((both.len(), both.order().unwrap().shares()), (14, vec![(7, 1024), (7, 3072)]));
    assert_eq!(both.sample(7 + 4).unwrap()[0].to_vec1::<i64>().unwrap(), [1, 1]);
    assert!(Mixture::<Source>::concatenated([]).is_err() && Mixture::<Source>::weighted([]).is_err());
}

fn file_in(place: &Scratch, name: &str, content: &[u8]) -> PathBuf {
    let path = place.0.join(name);
    fs::write(&path, content).unwrap();
    path
}

fn bytes(tokens: &[u32], width: usize) -> Vec<u8> {
    tokens.iter().flat_map(|token| token.to_le_bytes()[..width].to_vec()).collect()
}

#[test]
fn token_files_of_other_programs_are_read() {
    let place = Scratch::new("sources-forms");
    let narrow: Vec<u32> = (0..5000).map(|i| i * 7 % 50_257).collect();
    let wide: Vec<u32> = narrow.iter().map(|token| token + 70_000).collect();
    let header = |magic: u32, version: u32, count: usize| {
        let mut header = bytes(&[magic, version, count as u32], 4);
        header.resize(1024, 0);
        header
    };
    let files = [
        // As nanoGPT writes them.
        ("train.bin", bytes(&narrow, 2), &narrow),
        ("train.u32.bin", bytes(&wide, 4), &wide),
        ("shard.U32", bytes(&wide, 4), &wide),
        // As llm.c writes them.
        ("gpt2.bin", [header(20_240_520, 1, narrow.len()), bytes(&narrow, 2)].concat(), &narrow),
        ("llama3.bin", [header(20_240_801, 7, wide.len()), bytes(&wide, 4)].concat(), &wide),
    ];
    for (name, content, tokens) in files {
        let path = file_in(&place, name, &content);
        let file = TokenFile::open(&path).unwrap();
        assert_eq!((file.len(), &file.read(0..tokens.len()).unwrap()), (tokens.len(), tokens), "{name}");
        let (a, b) = file.split_at(4321);
        assert_eq!(
            (a.read(4000..4321).unwrap(), b.read(1..9).unwrap()),
            (tokens[4000..4321].to_vec(), tokens[4322..4330].to_vec())
        );
        let in_memory = TokenSequences::new(tokens[4321..].to_vec(), 60).unwrap();
        let in_file = TokenSequences::of_file(b, 60).unwrap();
        assert_eq!(in_file.len(), in_memory.len());
        for i in 0..in_file.len() {
            for (mine, expected) in in_file.sample(i).unwrap().iter().zip(in_memory.sample(i).unwrap()) {
                assert_eq!(mine.to_vec1::<i64>().unwrap(), expected.to_vec1::<i64>().unwrap(), "{name}");
            }
        }
        let spread = file.spread(4096).unwrap();
        assert!(spread.len() == 4096 && spread.iter().all(|token| tokens.contains(token)));
    }
    for vocab in [100, 100_000] {
        let (path, tokens) = (place.0.join("own.bin"), vec![99; 10]);
        let mut writer = TokenFileWriter::create(&path, vocab).unwrap();
        writer.push(&tokens[..3]).unwrap();
        writer.push(&tokens[3..]).unwrap();
        assert!(!path.exists() || vocab == 100_000, "a file appears when it is complete");
        writer.finish().unwrap();
        assert_eq!(TokenFile::open(&path).unwrap().read(0..10).unwrap(), tokens);
    }
    let mut writer = TokenFileWriter::create(place.0.join("never.bin"), 100).unwrap();
    assert!(writer.push(&[65_536]).unwrap_err().to_string().contains("65536"));
    drop(writer);
    assert!(
        fs::read_dir(&place.0).unwrap().all(|entry| !entry.unwrap().file_name().to_string_lossy().contains("never"))
    );
}

#[test]
fn token_files_that_cannot_be_right_are_refused() {
    let place = Scratch::new("sources-wrong");
    let refused = |path: &Path, parts: &[&str]| {
        let error = TokenFile::open(path).unwrap_err().to_string();
        assert!(parts.iter().all(|part| error.contains(part)), "{parts:?} in {error}");
    };
    let tokens: Vec<u32> = (0..600).collect();
    refused(&file_in(&place, "odd.bin", &[1, 2, 3]), &["odd.bin", "3 bytes"]);
    refused(&file_in(&place, "odd.u32", &[0; 6]), &["6 bytes"]);
    // u32 read as u16 would train on a zero after every token.
    refused(&file_in(&place, "wide.bin", &bytes(&tokens, 4)), &["every second token", ".u32.bin"]);
    let mut short = bytes(&[20_240_520, 1, 601], 4);
    short.resize(1024, 0);
    short.extend(bytes(&tokens, 2));
    refused(&file_in(&place, "short.bin", &short), &["600 tokens", "601 tokens, as its header says"]);
    refused(&place.0.join("none.bin"), &["none.bin"]);
    refused(&place.0, &["a directory instead of a file"]);
    let pipe = place.0.join("pipe.bin");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    refused(&pipe, &["a pipe instead of a file"]);

    let path = file_in(&place, "tokens.bin", &bytes(&tokens, 2));
    let file = TokenFile::open(&path).unwrap().with_vocab_size(500);
    assert_eq!(file.read(490..500).unwrap(), tokens[490..500]);
    let error = file.read(498..510).unwrap_err().to_string();
    assert!(error.contains("token 500 at position 500") && error.contains("tokenizer"), "{error}");
    // A file that becomes shorter is an error of the rank that reads it, and not a signal.
    fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(100).unwrap();
    let error = file.read(45..60).unwrap_err().to_string();
    assert!(error.contains("tokens.bin") && error.contains("does not change"), "{error}");
    assert!(
        TokenSequences::of_file(TokenFile::open(&path).unwrap(), 50).unwrap_err().to_string().contains("50 token(s)")
    );
}

#[test]
fn a_file_of_2_gb_is_read_with_64_mb_of_memory() {
    if !is_alone(module_path!(), "a_file_of_2_gb_is_read_with_64_mb_of_memory") {
        return;
    }
    const TOKENS: usize = 1 << 30;
    const LENGTH: usize = 4096;
    let place = Scratch::new("sources-large");
    let path = place.0.join("large.bin");
    // Sparse, with a token in the last sequence.
    let mut file = fs::File::create(&path).unwrap();
    file.set_len(2 * TOKENS as u64).unwrap();
    std::io::Seek::seek(&mut file, std::io::SeekFrom::End(-2)).unwrap();
    file.write_all(&7u16.to_le_bytes()).unwrap();
    let part: usize = env_or("SHARDWISE_TOKEN_FILE_PART", 16);
    fs::write("/proc/self/clear_refs", "5").unwrap();
    launch(2, move |world| {
        let mesh = world.mesh([("dp", 2)])?;
        let file = TokenFile::open(&path)?.with_vocab_size(50_000);
        assert_eq!(file.len(), TOKENS);
        assert_eq!(file.read(TOKENS - 2..TOKENS)?, [0, 7]);
        let sequences = TokenSequences::of_file(file, LENGTH)?;
        let batches = sequences.len() / 16 / part;
        let mut drawn = Batches::new(sequences, &mesh)?.shuffle(1).batch(16).sharded("dp")?;
        let mut sum = 0;
        for _ in 0..batches {
            let batch = drawn.next_batch()?;
            sum += batch[0].to_local()?.sum_all()?.to_scalar::<i64>()?;
        }
        assert_eq!(sum, 0);
        Ok(())
    })
    .unwrap();
    let peak = process_memory().1;
    println!("2 GB of tokens, of which 1/{part} was drawn, took {} MB at most", peak / 1_000_000);
    assert!(peak < 64 << 20, "{peak} bytes");
}

#[test]
fn texts_are_tokenized_in_parts_as_they_would_be_whole() {
    let place = Scratch::new("sources-texts");
    let tokenizer =
        || Tokenizer::from_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/conformance/data/models/gpt2")).unwrap();
    // Lines of all kinds, and enough of them for several parts.
    let mut rng = StdRng::seed_from_u64(3);
    let mut text = String::new();
    while text.len() < 3 << 20 {
        let words = ["the cat", " sat", "", "  indented", "1234", "Ünïcode", "it's", "!!!\n", "\ttab", "end "];
        text += words[rng.random_range(0..words.len())];
        // Few ends of lines are places to divide the text at.
        let ends = [" ", "\n\n", "\r\n", " \n", "\n ", "\n\t"];
        text += if rng.random_bool(0.02) { "\n" } else { ends[rng.random_range(0..ends.len())] };
    }
    let long = file_in(&place, "a.txt", text.as_bytes());
    let parts: Vec<_> = Texts::open(&long, "text").unwrap().collect::<Result<_>>().unwrap();
    assert!(parts.len() >= 3 && parts.iter().rev().skip(1).all(|part| !part.is_end));
    let is_space = |c: Option<char>| c.is_none_or(char::is_whitespace);
    for pair in parts.windows(2) {
        let (before, after) = (pair[0].text.strip_suffix('\n').unwrap(), &pair[1].text);
        assert!(!is_space(before.chars().last()) && !is_space(after.chars().next()), "{after:.9}");
    }
    assert_eq!(parts.iter().map(|part| part.text.as_str()).collect::<String>(), text);
    let lines = file_in(&place, "b.jsonl", b"{\"text\": \"one two\", \"id\": 1}\n\n{\"text\": \"three\"}\n");
    let empty = file_in(&place, "c.txt", b"");
    let end = tokenizer().special().eos.first().copied();
    let mut expected = tokenizer().encode_without_special(&text).unwrap();
    expected.extend(end);
    for document in ["one two", "three"] {
        expected.extend(tokenizer().encode(document).unwrap());
        expected.extend(end);
    }
    // An empty text is a document, too.
    expected.extend(end);
    let to = place.0.join("tokens.bin");
    for threads in [1, 3] {
        let files = vec![long.clone(), lines.clone(), empty.clone()];
        let running = Tokenization::start(files, "text", tokenizer(), &to, threads).unwrap();
        let total = running.progress().total_bytes;
        let file = running.wait().unwrap();
        assert_eq!(total, [&long, &lines, &empty].map(|path| fs::metadata(path).unwrap().len()).iter().sum::<u64>());
        assert!(
            file.read(0..file.len()).unwrap() == expected,
            "{threads} threads, {} tokens, not {}",
            file.len(),
            expected.len()
        );
    }
    fs::remove_file(&to).unwrap();

    let failing = |name: &str, content: &[u8], parts: &[&str]| {
        let path = file_in(&place, name, content);
        let error = Tokenization::start(vec![path], "text", Tokenizer::bytes(), &to, 2)
            .unwrap()
            .wait()
            .unwrap_err()
            .to_string();
        assert!(parts.iter().all(|part| error.contains(part)), "{parts:?} in {error}");
    };
    failing("bad.jsonl", b"{\"text\": \"a\"}\n{\"txt\": \"b\"}\n", &["line 2", "no `text` among `txt`"]);
    failing("worse.jsonl", b"{\"text\": 3}\n", &["line 1", "not a string"]);
    failing("truncated.jsonl", b"{\"text\": \"a\"}\n{\"text\": \"b", &["line 2"]);
    failing("latin.txt", b"caf\xe9\n", &["latin.txt", "utf-8"]);
    #[cfg(not(feature = "parquet"))]
    assert!(
        Texts::open(file_in(&place, "a.parquet", b"PAR1"), "text")
            .err()
            .unwrap()
            .to_string()
            .contains("--features parquet")
    );
    // Nothing is left of what failed or was ended; what was faster than its end is complete.
    assert!(!to.exists());
    drop(Tokenization::start(vec![long], "text", Tokenizer::bytes(), &to, 1).unwrap());
    let left = |entry: &fs::DirEntry| entry.file_name().to_string_lossy().contains("unfinished");
    assert!(!fs::read_dir(&place.0).unwrap().any(|entry| left(&entry.unwrap())));

    let names: Vec<_> = data_files(&place.0).unwrap().iter().map(|p| p.file_name().unwrap().to_owned()).collect();
    assert!(names.is_sorted() && names.iter().any(|name| name == "b.jsonl"), "{names:?}");
    assert!(data_files(place.0.join("none")).is_err());
    fs::create_dir(place.0.join("empty")).unwrap();
    assert!(data_files(place.0.join("empty")).unwrap_err().to_string().contains("without data"));
}

#[test]
fn an_order_of_one_source_is_that_of_earlier_versions() {
    // A checkpoint of an earlier version goes on with the same samples.
    let order = SampleOrder::new(1000).unwrap().shuffled(7);
    assert_eq!([0, 1, 2, 999, 1000, 5001].map(|at| order.sample(at)), [391, 810, 868, 828, 889, 142]);
}

#[cfg(feature = "parquet")]
#[test]
fn a_column_of_parquet_is_read_row_group_after_row_group() {
    use parquet::basic::{Compression, ZstdLevel};
    use parquet::data_type::{ByteArray, ByteArrayType, Int64Type};
    use parquet::file::properties::WriterProperties;
    use parquet::file::writer::SerializedFileWriter;

    let place = Scratch::new("sources-parquet");
    let schema = "message schema { REQUIRED INT64 id; OPTIONAL BYTE_ARRAY text (UTF8); }";
    let schema = std::sync::Arc::new(parquet::schema::parser::parse_message_type(schema).unwrap());
    for (name, compression) in [
        ("plain", Compression::UNCOMPRESSED),
        ("snappy", Compression::SNAPPY),
        ("zstd", Compression::ZSTD(ZstdLevel::default())),
    ] {
        let path = place.0.join(format!("{name}.parquet"));
        let properties = WriterProperties::builder().set_compression(compression).build().into();
        let mut writer =
            SerializedFileWriter::new(fs::File::create(&path).unwrap(), schema.clone(), properties).unwrap();
        // Every third row has no text.
        let text = |row: usize| (row % 3 != 2).then(|| format!("document {row} ü"));
        for group in 0..3 {
            let rows = group * 700..(group + 1) * 700;
            let mut open = writer.next_row_group().unwrap();
            let mut column = open.next_column().unwrap().unwrap();
            let ids: Vec<i64> = rows.clone().map(|row| row as i64).collect();
            column.typed::<Int64Type>().write_batch(&ids, None, None).unwrap();
            column.close().unwrap();
            let mut column = open.next_column().unwrap().unwrap();
            let levels: Vec<i16> = rows.clone().map(|row| i16::from(text(row).is_some())).collect();
            let texts: Vec<ByteArray> = rows.filter_map(text).map(|text| text.into_bytes().into()).collect();
            column.typed::<ByteArrayType>().write_batch(&texts, Some(&levels), None).unwrap();
            column.close().unwrap();
            open.close().unwrap();
        }
        writer.close().unwrap();
        let found: Vec<String> = Texts::open(&path, "text").unwrap().map(|part| part.unwrap().text).collect();
        assert_eq!(found, (0..2100).filter_map(text).collect::<Vec<_>>(), "{name}");
        let refused = |field: &str| Texts::open(&path, field).err().unwrap().to_string();
        assert!(refused("txt").contains("`id`, `text`") && refused("id").contains("INT64"), "{}", refused("id"));
    }
    let error = Texts::open(file_in(&place, "bad.parquet", b"PAR1 and no more"), "text").err().unwrap().to_string();
    assert!(error.contains("bad.parquet"), "{error}");
}
