//! Documents for fine-tuning: labels of answers against transformers, files of JSON lines, packing.

use std::path::PathBuf;

use serde_json::Value;
use shardwise::ErrorKind;
use shardwise::data::{Dataset, IGNORED_LABEL, LabeledTokens, PackedSequences, Packing, read_documents};
use shardwise::text::{Message, TextFiles, Tokenizer};

fn model(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/conformance/data/models").join(name)
}

/// The tokens that count.
fn counted(document: &LabeledTokens) -> Vec<u32> {
    assert_eq!(document.ids.len(), document.labels.len());
    let pairs = document.ids.iter().zip(&document.labels).filter(|(_, label)| **label != IGNORED_LABEL);
    pairs.map(|(id, label)| (*id, i64::from(*id) == *label).0).collect()
}

#[test]
fn answers_count_as_transformers_marks_them() {
    let text = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/answer_masks.jsonl")).unwrap();
    let mut cases = 0;
    for case in text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()) {
        let mut files = TextFiles::read(model(case["model"].as_str().unwrap())).unwrap();
        files.chat_template = Some(case["template"].as_str().unwrap().to_string());
        let tokenizer = Tokenizer::new(&files).unwrap();
        let messages: Vec<Message> = serde_json::from_value(case["messages"].clone()).unwrap();
        let found = LabeledTokens::conversation(&tokenizer, &messages, None).unwrap();
        let ids: Vec<u32> = serde_json::from_value(case["ids"].clone()).unwrap();
        let mask: Vec<u32> = serde_json::from_value(case["mask"].clone()).unwrap();
        assert_eq!(found.ids, ids);
        let labels: Vec<i64> =
            ids.iter().zip(&mask).map(|(&id, &counts)| if counts == 1 { id.into() } else { IGNORED_LABEL }).collect();
        assert_eq!(found.labels, labels, "{case}");
        cases += 1;
    }
    assert_eq!(cases, 6);
}

#[test]
fn completions_count_without_their_prompt_and_end() {
    for name in ["llama_gqa", "mistral", "mixtral", "gpt2"] {
        let tokenizer = Tokenizer::from_dir(model(name)).unwrap();
        let found = LabeledTokens::completion(&tokenizer, "The capital is", " Zürich, of course.").unwrap();
        let end = tokenizer.special().eos[0];
        assert_eq!((found.ids.last(), found.labels.last()), (Some(&end), Some(&i64::from(end))), "{name}");
        let all = tokenizer.encode("The capital is Zürich, of course.").unwrap();
        assert!(found.ids.starts_with(&all), "{name}");
        let answer = tokenizer.decode(&counted(&found)).unwrap();
        assert_eq!(answer.trim_start(), "Zürich, of course.", "{name}");
        let first = found.labels.iter().position(|&label| label != IGNORED_LABEL).unwrap();
        assert!(tokenizer.decode(&found.ids[..first]).unwrap().trim_end() == "The capital is", "{name}");
    }
}

#[test]
fn files_of_json_lines_are_read_and_wrong_lines_are_named() {
    let tokenizer = Tokenizer::from_dir(model("llama_gqa")).unwrap();
    let path = std::env::temp_dir().join(format!("shardwise-conversations-{}.jsonl", std::process::id()));
    let read = |text: &str| {
        std::fs::write(&path, text).unwrap();
        read_documents(&path, &tokenizer)
    };
    let good = "{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}, {\"role\": \"assistant\", \"content\": \"b c\"}]}\n\
                \n{\"prompt\": \"x\", \"completion\": \" y\"}\n{\"text\": \"plain text\"}\n";
    let found = read(good).unwrap();
    assert_eq!(found.len(), 3);
    // The model's own template trims, and ends answers with a line feed that the model never writes.
    assert_eq!(tokenizer.decode_with_special(&counted(&found[0])).unwrap(), "b c<|im_end|>");
    assert_eq!(found[2].labels.iter().filter(|&&label| label == IGNORED_LABEL).count(), 0);
    for (line, part) in [
        ("{\"text\": 5}", "line 5"),
        ("not json", "line 5"),
        ("{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}]}", "no answer"),
        ("{\"prompt\": \"x\", \"completion\": \"\"}", "empty"),
    ] {
        let error = read(&format!("{good}{line}\n")).unwrap_err();
        assert_eq!(error.kind(), Some(&ErrorKind::Data), "{error}");
        assert!(error.to_string().contains("line 5") && error.to_string().contains(part), "{error}");
    }
    assert!(read("\n\n").unwrap_err().to_string().contains("no lines"));
    std::fs::remove_file(&path).unwrap();
    assert!(matches!(read_documents(&path, &tokenizer).unwrap_err().kind(), Some(ErrorKind::Path { .. })));
    // A template that shortens earlier answers cannot be learnt turn by turn.
    let mut files = TextFiles::read(model("llama_gqa")).unwrap();
    files.chat_template =
        Some("{% for m in messages %}{{ m.content if loop.last else m.content[:1] }}|{% endfor %}".into());
    let messages = [("user", "ab"), ("assistant", "cd"), ("user", "ef")].map(|(role, text)| Message::new(role, text));
    let error = LabeledTokens::conversation(&Tokenizer::new(&files).unwrap(), &messages, None).unwrap_err();
    assert!(error.to_string().contains("message 1"), "{error}");
}

#[test]
fn packing_loses_no_token_and_predicts_across_no_border() {
    // Documents of lengths 1 to 23 with tokens that occur once.
    let mut next = 1u32;
    let documents: Vec<LabeledTokens> = (0..60)
        .map(|i| {
            let ids: Vec<u32> = (0..1 + i * 7 % 23).map(|_| (next, next += 1).0).collect();
            LabeledTokens::all(ids)
        })
        .collect();
    let length = 16;
    let follows: std::collections::BTreeSet<(i64, i64)> = documents
        .iter()
        .flat_map(|document| document.ids.windows(2).map(|pair| (pair[0].into(), pair[1].into())))
        .collect();
    for packing in [Packing::Packed, Packing::OnePerSequence] {
        let packed = PackedSequences::new(&documents, length, 0, packing).unwrap();
        let (mut seen, mut predicted) = (Vec::new(), 0);
        for i in 0..packed.len() {
            let sample = packed.sample(i).unwrap();
            let (ids, targets) = (sample[0].to_vec1::<i64>().unwrap(), sample[1].to_vec1::<i64>().unwrap());
            assert_eq!((ids.len(), targets.len()), (length, length));
            seen.extend(ids.iter().copied().filter(|&id| id != 0));
            for (id, target) in ids.iter().zip(&targets).filter(|(_, target)| **target != IGNORED_LABEL) {
                assert!(follows.contains(&(*id, *target)), "{id} -> {target}");
                predicted += 1;
            }
        }
        seen.sort_unstable();
        // Only parts of one token, which nothing predicts and which predict nothing, may be left out.
        let alone = |id: i64| {
            documents.iter().flat_map(|document| document.ids.chunks(length)).any(|part| *part == [id as u32])
        };
        let expected: Vec<i64> = (1..i64::from(next)).filter(|&id| seen.contains(&id) || !alone(id)).collect();
        assert!(seen == expected, "{packing:?}");
        // A document longer than a sequence loses one prediction, at the split.
        let split: usize = documents.iter().map(|document| document.ids.len().div_ceil(length) - 1).sum();
        assert_eq!(predicted, follows.len() - split);
        assert!(packed.fill() > if packing == Packing::Packed { 0.9 } else { 0.4 }, "{}", packed.fill());
    }
    assert!(PackedSequences::new(&documents, 1, 0, Packing::Packed).is_err());
    let silent = LabeledTokens { ids: vec![1, 2], labels: vec![IGNORED_LABEL; 2] };
    assert!(PackedSequences::new(&[silent], 8, 0, Packing::Packed).unwrap_err().to_string().contains("predict"));
}
