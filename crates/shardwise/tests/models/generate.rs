//! Generation: the recorded tokens of transformers on every mesh, batches, seeds, stop texts, conversations, bad inputs.

use std::path::PathBuf;

use serde_json::Value;
use shardwise::generate::{
    CachedPredictor, ChatSession, Generation, NextLogits, Sampling, StopReason, UncachedPredictor, perplexity,
};
use shardwise::models::{self, GptConfig, ModelSpec, PretrainedModel, load_tokenizer};
use shardwise::nn::{Builder, Module, ModuleItem};
use shardwise::plan::{DataParallel, ShardingPlanner, TensorParallel};
use shardwise::prelude::*;
use shardwise::text::{ChatOptions, Message};

const MESHES: [&str; 4] = ["tp=1", "tp=2", "tp=3", "dp=2,tp=2"];

fn directory(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/conformance/data/models").join(name)
}

fn cases(name: &str) -> Value {
    serde_json::from_str(&std::fs::read_to_string(directory(name).join("cases.json")).unwrap()).unwrap()
}

fn ids(value: &Value) -> Vec<Vec<u32>> {
    serde_json::from_value(value.clone()).unwrap()
}

/// What the first rank returns; all ranks must return the same.
fn on_mesh<T: PartialEq + std::fmt::Debug + Send + 'static>(
    name: &'static str,
    mesh: &str,
    body: impl Fn(&PretrainedModel) -> Result<T> + Send + Sync + 'static,
) -> T {
    let mesh: Mesh = mesh.parse().unwrap();
    let world = ThreadWorld::new(mesh.size()).unwrap();
    let mut found = world
        .run(move |world| {
            let mesh = world.device_mesh(mesh.clone())?;
            match mesh.axis("dp").is_ok() {
                true => body(&models::load(
                    directory(name),
                    &mesh,
                    TensorParallel::new("tp").and(DataParallel::new(["dp"])),
                )?),
                false => body(&models::load(directory(name), &mesh, TensorParallel::new("tp"))?),
            }
        })
        .unwrap();
    let first = found.swap_remove(0);
    assert!(found.iter().all(|other| *other == first), "ranks differ: {first:?} {found:?}");
    first
}

#[test]
fn recorded_generations_are_the_same_on_every_mesh() {
    for name in ["llama_gqa", "gpt2", "mistral"] {
        let recorded = cases(name);
        for mesh in MESHES {
            let generate = recorded["generate"].as_array().unwrap().clone();
            let expected: Vec<Vec<Vec<u32>>> = generate.iter().map(|case| ids(&case["output"])).collect();
            let found = on_mesh(name, mesh, move |model| {
                let tokenizer = model.tokenizer()?;
                let mut found = Vec::new();
                for case in &generate {
                    let mut prompts = ids(&case["input_ids"]);
                    if !case["attention_mask"].is_null() {
                        let masks = ids(&case["attention_mask"]);
                        for (prompt, mask) in prompts.iter_mut().zip(masks) {
                            prompt.drain(..mask.iter().filter(|&&real| real == 0).count());
                        }
                    }
                    let eos: Vec<u32> = serde_json::from_value(case["eos_token_id"].clone()).unwrap();
                    let most = case["max_new_tokens"].as_u64().unwrap() as usize;
                    let sampling = Sampling::greedy().tokens(most).eos(&eos);
                    let rows = Generation::new(CachedPredictor::new(model)?, tokenizer, &prompts, sampling)?;
                    found.push(rows.collect_padded()?);
                }
                Ok(found)
            });
            assert_eq!(found, expected, "{name} on {mesh}");
        }
    }
}

#[test]
fn a_text_is_continued_as_recorded_and_streamed_completely() {
    for (name, mesh) in [("qwen2", "tp=3"), ("qwen3", "tp=1"), ("gpt2", "tp=2")] {
        let recorded = cases(name);
        let case = recorded["cases"][0].clone();
        let (text, expected) = (case["text"].as_str().unwrap().to_string(), ids(&case["greedy"]).swap_remove(0));
        let prompt = ids(&case["input_ids"]).swap_remove(0);
        let (found, streamed) = on_mesh(name, mesh, move |model| {
            let mut generation = model.generate(&text, Sampling::greedy().tokens(24))?;
            let mut streamed = String::new();
            for token in generation.by_ref() {
                streamed += token?.text();
            }
            let stats = generation.stats();
            assert_eq!((stats.new_tokens, stats.decoded_tokens), (24, 23));
            assert!(stats.tokens_per_second() > 0.0 && !stats.time_to_first_token.is_zero());
            Ok((generation.tokens(0).to_vec(), streamed))
        });
        assert_eq!(found, expected, "{name}");
        let tokenizer = load_tokenizer(directory(name)).unwrap();
        let all = tokenizer.decode(&[&prompt[..], &expected].concat()).unwrap();
        assert_eq!(tokenizer.decode(&prompt).unwrap() + &streamed, all, "{name}");
    }
}

#[test]
fn a_seed_gives_the_same_tokens_on_every_mesh_alone_and_in_a_batch() {
    let settings = [
        Sampling::new(0.9).seed(3),
        Sampling::new(1.3).top_k(20).top_p(0.9).min_p(0.05).seed(4),
        Sampling::new(0.8).top_k(40).repetition_penalty(1.4).seed(5),
        Sampling::greedy().repetition_penalty(1.3),
    ];
    let mut expected: Vec<Vec<Vec<u32>>> = Vec::new();
    for mesh in MESHES {
        let settings = settings.clone();
        let found = on_mesh("llama_gqa", mesh, move |model| {
            let prompts = ["The number of heads", "hello world and more", "x"];
            let mut all = Vec::new();
            for sampling in &settings {
                let sampling = sampling.clone().tokens(12).eos(&[]);
                let batch = model.generate_batch(&prompts, sampling.clone())?.collect_padded()?;
                let alone = model.generate(prompts[1], sampling.clone())?.collect_padded()?;
                assert_eq!(alone[0], batch[1], "{sampling:?}");
                all.push(batch);
            }
            Ok(all)
        });
        if expected.is_empty() {
            expected = found.clone();
        }
        assert_eq!(found, expected, "{mesh}");
    }
    let rows: std::collections::BTreeSet<&Vec<u32>> = expected.iter().flatten().collect();
    assert_eq!(rows.len(), 12, "settings and prompts change the tokens");
}

#[test]
fn sharded_logits_are_not_gathered_for_greedy_decoding_and_top_k() {
    let within = |sampling: Sampling, most: usize| {
        on_mesh("llama_gqa", "tp=3", move |model| {
            let generation = model.generate("hello", sampling.clone().tokens(5).eos(&[]))?;
            let world = model.named_parameters()[0].1.get().device_mesh().world().clone();
            world.trace().clear();
            generation.collect_padded()?;
            let report = world.trace().report();
            let own = report.0.iter().filter(|(by, ..)| *by == "next_token").map(|(.., total)| total.bytes);
            let bytes = own.sum::<usize>();
            assert!(bytes > 0);
            Ok(bytes <= most)
        })
    };
    // Per step, to each of two other ranks: k logits of 4 bytes and k ids of 8. A rank has 170 or 171 of 512 logits.
    assert!(within(Sampling::greedy(), 5 * 2 * 12));
    assert!(within(Sampling::new(1.0).top_k(10), 5 * 2 * 10 * 12));
    assert!(!within(Sampling::new(1.0), 5 * 2 * 170 * 4 - 1));
}

#[test]
fn stop_texts_and_limits_end_rows() {
    on_mesh("llama_gqa", "tp=2", |model| {
        let prompt = "The number of heads is nine.";
        let whole = model.generate(prompt, Sampling::greedy().tokens(20).eos(&[]))?.text()?.swap_remove(0);
        let from = whole.char_indices().nth(whole.chars().count() / 2).unwrap().0;
        let stop: String = whole[from..].chars().take(3).collect();
        let mut reasons = Vec::new();
        let mut text = String::new();
        for token in model.generate(prompt, Sampling::greedy().tokens(20).eos(&[]).stop(&stop))? {
            let token = token?;
            text += token.text();
            reasons.extend(token.stop);
        }
        assert_eq!((text.as_str(), &reasons[..]), (&whole[..whole.find(&stop).unwrap()], &[StopReason::StopText][..]));
        // The context has 256 positions; the token after the last one is the last one.
        let long = [vec![5u32; 250]];
        let tokenizer = model.tokenizer()?;
        let generation = Generation::new(CachedPredictor::new(model)?, tokenizer, &long, Sampling::greedy().eos(&[]))?;
        let tokens = generation.collect::<Result<Vec<_>>>()?;
        assert_eq!((tokens.len(), tokens[6].stop), (7, Some(StopReason::Context)));
        assert_eq!(model.generate(prompt, Sampling::greedy().tokens(0))?.count(), 0);
        let counted = model.generate(prompt, Sampling::greedy().tokens(2).eos(&[]))?.collect::<Result<Vec<_>>>()?;
        assert_eq!((counted.len(), counted[1].stop), (2, Some(StopReason::MaxTokens)));
        let first = counted[0].id;
        let ended = model.generate(prompt, Sampling::greedy().eos(&[first]))?.collect::<Result<Vec<_>>>()?;
        assert_eq!((ended.len(), ended[0].stop), (1, Some(StopReason::EndToken)));
        Ok(())
    });
}

#[test]
fn a_conversation_keeps_its_cache_and_answers_as_without() {
    on_mesh("llama_gqa", "tp=3", |model| {
        let tokenizer = model.tokenizer()?;
        let sampling = Sampling::greedy().tokens(9);
        let mut chat = ChatSession::new(model, tokenizer)?;
        chat.add(Message::new("system", "Answer in one word."));
        let mut said = Vec::new();
        let first = chat.say("How many heads?", &sampling, |token| {
            said.push(token.id);
            Ok(())
        })?;
        assert_eq!(first.computed_tokens, first.stats.prompt_tokens);
        let mut shown = String::new();
        let second = chat.say("And key heads?", &sampling, |token| {
            shown += token.text();
            Ok(())
        })?;
        assert_eq!(shown, second.text);
        // Only what is new, and the last token of the first answer, which nothing had followed.
        assert!(second.computed_tokens < second.stats.prompt_tokens - 20, "{second:?}");
        // The tokens of the answer stay as they were generated, whatever their text would be encoded to.
        let messages = chat.messages().to_vec();
        assert_eq!(messages.len(), 5);
        let options = ChatOptions { add_generation_prompt: true, ..ChatOptions::default() };
        let before = tokenizer.chat_text(&messages[..2], &options)?;
        let all = tokenizer.chat_text(&messages[..4], &options)?;
        let mut ids = tokenizer.encode_without_special(&before)?;
        ids.extend(&said);
        ids.extend(
            tokenizer.encode_without_special(all.strip_prefix(&(before + &first.text)).expect("a text that grows"))?,
        );
        let anew = Generation::new(CachedPredictor::new(model)?, tokenizer, &[ids], sampling.clone())?;
        assert_eq!(anew.text()?[0], second.text);
        let failed = chat.say("Once more", &sampling, |_| Err(Error::other("no screen"))).unwrap_err();
        assert!(failed.to_string().contains("no screen") && chat.messages().len() == 5);
        assert!(chat.say("And key heads?", &sampling, |_| Ok(()))?.computed_tokens > 40, "a new cache after a failure");
        Ok(())
    });
}

#[test]
fn perplexity_is_the_exponential_of_the_mean_loss_of_counted_tokens() {
    let recorded = cases("llama_gqa");
    let (rows, loss) = (ids(&recorded["train"]["input_ids"]), recorded["train"]["loss"].as_f64().unwrap());
    for mesh in ["tp=1", "dp=2,tp=2"] {
        let tokens = (rows.len() * (rows[0].len() - 1)) as u64;
        let rows = rows.clone();
        let found = on_mesh("llama_gqa", mesh, move |model| {
            let mesh = model.named_parameters()[0].1.get().device_mesh().clone();
            let placements = models::batch_placements(mesh.mesh());
            let (count, length) = (rows.len(), rows[0].len());
            let placed = |value: &dyn Fn(&[usize]) -> f64| {
                DTensor::from_fn((count, length), DType::I64, &mesh, placements.clone(), value)
            };
            let id = placed(&|i| f64::from(rows[i[0]][i[1]]))?;
            let next = placed(&|i| rows[i[0]].get(i[1] + 1).map_or(-100.0, |&id| f64::from(id)))?;
            let found = perplexity(model, [Ok(vec![id.clone(), next]), Ok(vec![id.clone(), placed(&|_| -100.0)?])])?;
            assert!(perplexity(model, [Ok(vec![id, placed(&|_| -100.0)?])]).is_err());
            Ok((found.tokens, (found.loss * 1e5).round(), found.value().ln() - found.loss < 1e-9))
        });
        assert!(found.0 == tokens && (found.1 / 1e5 - loss).abs() < 2e-5 && found.2, "{found:?}, not {loss}");
    }
}

#[test]
fn generation_and_perplexity_leave_the_mode_of_the_model() {
    on_mesh("gpt2", "tp=2", |model| {
        let modes = || {
            let mut modes = Vec::new();
            model.walk("", &mut |_, item| {
                if let ModuleItem::TrainingMode(mode) = item {
                    modes.push(mode.is_training());
                }
            });
            assert!(!modes.is_empty() && modes.iter().all(|mode| *mode == modes[0]), "{modes:?}");
            modes[0]
        };
        let tokenizer = model.tokenizer()?;
        for training in [true, false, true] {
            model.set_training(training);
            let mut first = model.generate("hello", Sampling::greedy().tokens(3))?;
            first.next().expect("a token")?;
            assert!(!modes(), "in evaluation mode as long as it generates");
            // Two that overlap, and the one that began first ends first.
            let mut second = model.generate("heads", Sampling::greedy().tokens(3))?;
            drop(first);
            assert!(!modes());
            second.next().expect("a token")?;
            drop(second);
            assert_eq!(modes(), training);
            assert!(Generation::new(CachedPredictor::new(model)?, tokenizer, &[], Sampling::greedy()).is_err());
            assert_eq!(modes(), training);
            assert!(perplexity(model, [Err(Error::other("no file"))]).is_err());
            assert_eq!(modes(), training);
            // What is set meanwhile counts afterwards.
            let generation = model.generate("hello", Sampling::greedy())?;
            model.set_training(!training);
            assert!(!modes());
            drop(generation);
            assert_eq!(modes(), !training);
        }
        Ok(())
    });
}

#[test]
fn bad_prompts_are_refused() {
    on_mesh("gpt2", "tp=2", |model| {
        let tokenizer = model.tokenizer()?;
        let refused = |prompts: &[Vec<u32>], sampling: Sampling| -> Result<String> {
            let error = Generation::new(CachedPredictor::new(model)?, tokenizer, prompts, sampling).err();
            Ok(error.expect("an error").to_string())
        };
        for (prompts, parts) in [
            (vec![], ["prompt", "none"]),
            (vec![vec![]], ["no tokens", "not empty"]),
            (vec![vec![1], vec![]], ["no tokens in prompt 1", "not empty"]),
            (vec![vec![1; 97]], ["97 tokens", "at most 96"]),
            (vec![vec![320]], ["token 320", "tokenizer"]),
        ] {
            let error = refused(&prompts, Sampling::greedy())?;
            assert!(parts.iter().all(|part| error.contains(part)), "{error}");
        }
        assert!(refused(&[vec![1]], Sampling::new(-1.0))?.contains("temperature"));
        let error = ChatSession::new(model, tokenizer).err().expect("an error").to_string();
        assert!(error.contains("chat template"), "{error}");
        Ok(())
    });
    let error = load_tokenizer("/no/such/model").unwrap_err();
    assert!(error.to_string().contains("/no/such/model"), "{error}");
}

/// A row of a model with learned positions for 16 tokens grows to 40: its logits are those of a pass without a cache over the
/// tokens that are not forgotten, on any mesh.
#[test]
fn a_forgetful_predictor_goes_on_after_the_context() {
    const CONTEXT: usize = 16;
    for mesh in MESHES {
        let mesh: Mesh = mesh.parse().unwrap();
        let world = ThreadWorld::new(mesh.size()).unwrap();
        world
            .run(move |world| {
                let mesh = world.device_mesh(mesh.clone())?;
                let config = GptConfig { seq_len: CONTEXT, d_model: 24, n_layers: 2, d_ff: 32, ..GptConfig::default() };
                let model = config.build(&Builder::new(&mesh))?;
                let mut cached = CachedPredictor::new(&model)?.forgetful();
                assert_eq!(cached.context(), None);
                cached.start(&[0])?;
                let (mut new, mut window) = (vec![7, 3, 9], Vec::new());
                for step in 0..40 {
                    window.extend(&new);
                    if window.len() > CONTEXT {
                        window.drain(..window.len() - CONTEXT / 2);
                    }
                    let mut uncached = UncachedPredictor::new(&model, config.vocab_size, CONTEXT)?;
                    uncached.start(&[0])?;
                    let expected = uncached.next_logits(std::slice::from_ref(&window))?.full_tensor()?;
                    let found = cached.next_logits(std::slice::from_ref(&new))?.full_tensor()?;
                    let (expected, found) = (expected.to_vec2::<f32>()?, found.to_vec2::<f32>()?);
                    for (e, f) in expected[0].iter().zip(&found[0]) {
                        assert!((e - f).abs() < 1e-5, "step {step}: {f}, not {e}");
                    }
                    new = vec![(step * 31 + 5) % 256];
                }
                Ok(())
            })
            .unwrap();
    }
}
