//! Tokenizers and chat templates: against transformers, on hostile files, one token at a time.

use serde_json::{Value, json};
use shardwise::ErrorKind;
use shardwise::text::{ChatOptions, ChatTemplate, Message, SpecialTokens, TextFiles, Tokenizer};

/// A directory of test data.
fn model(name: &str) -> std::path::PathBuf {
    std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/conformance/data/models").join(name)
}

#[test]
fn chat_templates_render_what_transformers_renders() {
    let text =
        std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/chat_templates.jsonl")).unwrap();
    let mut rendered = 0;
    for line in text.lines() {
        // Messages are parsed from the text: their fields have an order.
        #[derive(serde::Deserialize)]
        struct Case {
            id: String,
            template: String,
            messages: Vec<Message>,
            tools: Option<Box<serde_json::value::RawValue>>,
            special: serde_json::Map<String, Value>,
            add_generation_prompt: bool,
            text: Option<String>,
            error: Option<String>,
        }
        let case: Case = serde_json::from_str(line).unwrap();
        let special = case.special.iter().map(|(name, text)| (name.clone(), text.as_str().unwrap().to_string()));
        let special = SpecialTokens { texts: special.collect(), ..SpecialTokens::default() };
        let options = ChatOptions {
            add_generation_prompt: case.add_generation_prompt,
            tools: case.tools.map(|tools| tools.get().to_string()).filter(|tools| tools != "null"),
            ..ChatOptions::default()
        };
        let found = ChatTemplate::new(&case.template).unwrap().render(&case.messages, &options, &special);
        match (case.text, case.error) {
            (Some(expected), _) => assert_eq!(found.unwrap(), expected, "template {}", case.id),
            (None, error) => {
                let found = found.unwrap_err();
                assert!(found.to_string().contains(&error.unwrap()), "template {}: {found}", case.id);
                assert_eq!(found.kind(), Some(&ErrorKind::Data));
            }
        }
        rendered += 1;
    }
    assert_eq!(rendered, 60);
}

#[test]
fn bad_templates_are_errors_and_end() {
    let render =
        |source: &str| ChatTemplate::new(source)?.render(&[], &ChatOptions::default(), &SpecialTokens::default());
    let error = ChatTemplate::new("{% for m in messages %}").unwrap_err();
    assert!(error.kind() == Some(&ErrorKind::Model) && error.to_string().contains("chat template"), "{error}");
    let error = ChatTemplate::new("{% include 'tokenizer.json' %}").unwrap_err();
    assert!(error.to_string().contains("of which a chat template has none"), "{error}");
    for source in [
        "{% for a in range(90000) %}{% for b in range(90000) %}{{ b }}{% endfor %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ undefined_name.field }}",
    ] {
        let error = render(source).unwrap_err();
        assert!(error.to_string().starts_with("invalid conversation"), "{source}: {error}");
    }
    // The date of today has as many characters as any other.
    assert_eq!(render("{{ strftime_now('%d %b %Y') }}").unwrap().len(), 11);
}

#[test]
fn templates_of_a_list_are_chosen_by_tools() {
    let list =
        json!([{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools | length }}"}]);
    let files = TextFiles { tokenizer_config: json!({ "chat_template": list }), ..TextFiles::default() };
    let template = ChatTemplate::of(&files).unwrap().unwrap();
    let render = |tools: Option<&str>| {
        let options = ChatOptions { tools: tools.map(String::from), ..ChatOptions::default() };
        template.render(&[], &options, &SpecialTokens::default()).unwrap()
    };
    assert_eq!((render(None).as_str(), render(Some("[{}, {}]")).as_str()), ("plain", "2"));
    let none = TextFiles { tokenizer_config: json!({"chat_template": [{"name": "x", "template": ""}]}), ..files };
    assert!(ChatTemplate::of(&none).unwrap_err().to_string().contains("default"));
}

#[test]
fn special_tokens_come_from_generation_then_model_then_tokenizer() {
    let tokenizer = std::fs::read(model("llama_gqa").join("tokenizer.json")).unwrap();
    let special = |generation: Value, config: Value, own: Value| {
        let files = TextFiles {
            tokenizer: tokenizer.clone(),
            generation_config: generation,
            config,
            tokenizer_config: own,
            ..TextFiles::default()
        };
        Tokenizer::new(&files).map(|tokenizer| tokenizer.special().clone())
    };
    let found =
        special(json!({"eos_token_id": [5, 6]}), json!({"eos_token_id": 7, "pad_token_id": 8}), json!({})).unwrap();
    assert_eq!((found.eos, found.pad, found.bos), (vec![5, 6], Some(8), None));
    let texts = json!({"eos_token": {"content": "<|im_end|>"}, "bos_token": "<|im_start|>", "pad_token": null});
    let found = special(Value::Null, json!({"eos_token_id": -1}), texts).unwrap();
    assert_eq!((found.text("eos_token"), found.bos), (Some("<|im_end|>"), Some(1)));
    assert_eq!((found.eos, found.pad), (vec![2], Some(2)));
    let error = special(json!({"eos_token_id": "two"}), json!({}), json!({})).unwrap_err();
    assert!(error.to_string().contains("eos_token_id"), "{error}");
}

#[test]
fn padding_and_truncation_of_the_file_do_not_apply() {
    let text = std::fs::read_to_string(model("bert").join("tokenizer.json")).unwrap();
    let mut asks: Value = serde_json::from_str(&text).unwrap();
    asks["padding"] = json!({
        "strategy": {"Fixed": 128}, "direction": "Right", "pad_to_multiple_of": null, "pad_id": 0, "pad_type_id": 0, "pad_token": "[PAD]"
    });
    asks["truncation"] = json!({"direction": "Right", "max_length": 6, "strategy": "LongestFirst", "stride": 0});
    let files = TextFiles { tokenizer: asks.to_string().into_bytes(), ..TextFiles::default() };
    let (plain, padded) = (Tokenizer::from_dir(model("bert")).unwrap(), Tokenizer::new(&files).unwrap());
    let sentence = "The number of heads is nine and so on and on.";
    assert_eq!(padded.encode(sentence).unwrap(), plain.encode(sentence).unwrap());
    let pair = plain.encode_pair(sentence, Some("hello world"), 12).unwrap();
    let whole = plain.encode_pair(sentence, Some("hello world"), usize::MAX).unwrap();
    assert!(pair.ids.len() == 12 && whole.ids.len() > 12);
    // [CLS] a [SEP] b [SEP]: special tokens stay, and the longer text is shortened first
    assert_eq!((pair.ids[0], pair.ids[11]), (2, 3));
    assert_eq!(pair.types.iter().filter(|&&kind| kind == 1).count(), 5);
    assert!(plain.encode_pair(sentence, None, 1).is_err());
    // written back with what it asks for
    let path = std::env::temp_dir().join(format!("shardwise-text-{}.json", std::process::id()));
    assert!(padded.write(&path).unwrap());
    let written: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    std::fs::remove_file(&path).unwrap();
    assert_eq!(
        (&written["padding"]["strategy"], &written["truncation"]["max_length"]),
        (&json!({"Fixed": 128}), &json!(6))
    );
}

#[test]
fn prompts_have_special_tokens_in_front_only() {
    // The tokenizer of mixtral adds tokens on both sides, that of mistral in front, that of gpt2 none.
    for name in ["mixtral", "mistral", "gpt2"] {
        let tokenizer = Tokenizer::from_dir(model(name)).unwrap();
        let cases: Value = serde_json::from_slice(&std::fs::read(model(name).join("cases.json")).unwrap()).unwrap();
        for case in cases["cases"].as_array().unwrap().iter().filter(|case| case["text"].is_string()) {
            let ids: Vec<u32> = serde_json::from_value(case["input_ids"][0].clone()).unwrap();
            assert_eq!(tokenizer.encode_prompt(case["text"].as_str().unwrap()).unwrap(), ids, "{name}");
        }
    }
}

#[test]
fn streams_end_at_characters_and_keep_spaces() {
    for name in ["llama_gqa", "mistral", "mixtral", "qwen2"] {
        let tokenizer = Tokenizer::from_dir(model(name)).unwrap();
        for text in ["Zürich, Łódź  and\n crème 日本語 🙂🙃 end", " two  spaces ", "é"] {
            let ids = tokenizer.encode(text).unwrap();
            for cut in 0..ids.len() {
                let mut stream = tokenizer.stream(&ids[..cut]);
                let pieces: Vec<String> = ids[cut..].iter().map(|&id| stream.push(id).unwrap()).collect();
                assert!(pieces.iter().all(|piece| !piece.contains('\u{fffd}')) || cut > 0, "{name}: {pieces:?}");
                let whole = pieces.concat() + &stream.finish().unwrap();
                let (all, before) = (tokenizer.decode(&ids).unwrap(), tokenizer.decode(&ids[..cut]).unwrap());
                // Half a character before the border is shown as a replacement, and completed after it.
                let before = before.trim_end_matches('\u{fffd}');
                assert_eq!(whole, all[before.len()..], "{name}: {text:?} after {cut}");
            }
        }
    }
    // bytes that never become a character
    let bytes = Tokenizer::bytes();
    let mut stream = bytes.stream(&[]);
    let pieces = [0xf0, 0x9f, 0x41].map(|id| stream.push(id).unwrap());
    assert_eq!(pieces.concat() + &stream.finish().unwrap(), "\u{fffd}A");
    assert_eq!((stream.push(0xc3).unwrap() + &stream.finish().unwrap()).as_str(), "\u{fffd}");
}

/// Tokens are the bytes of € (0, 1, 2), a byte that no character has (3), and the letter a (4).
fn byte_fallback() -> Tokenizer {
    let tokenizer = json!({
        "version": "1.0", "added_tokens": [], "normalizer": null, "pre_tokenizer": null, "post_processor": null,
        "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": {
            "type": "BPE", "unk_token": null, "fuse_unk": true, "byte_fallback": true, "merges": [],
            "vocab": {"<0xE2>": 0, "<0x82>": 1, "<0xAC>": 2, "<0xFF>": 3, "a": 4},
        },
    });
    Tokenizer::new(&TextFiles { tokenizer: tokenizer.to_string().into_bytes(), ..TextFiles::default() }).unwrap()
}

#[test]
fn invalid_bytes_do_not_spoil_a_character_that_was_streamed() {
    let tokenizer = byte_fallback();
    let streamed = |ids: &[u32]| {
        let mut stream = tokenizer.stream(&[]);
        ids.iter().map(|&id| stream.push(id).unwrap()).collect::<String>() + &stream.finish().unwrap()
    };
    assert_eq!(tokenizer.decode(&[0, 1, 2, 4]).unwrap(), "€a");
    assert_eq!(tokenizer.decode(&[0, 1, 2, 3]).unwrap(), "\u{fffd}\u{fffd}\u{fffd}\u{fffd}");
    assert_eq!(streamed(&[0, 1, 2, 3]), "€\u{fffd}");
    assert_eq!(streamed(&[4, 0, 1, 2, 3, 4]), "a€\u{fffd}a");
    assert_eq!(streamed(&[0, 1, 2, 3, 3, 4, 0, 1, 2, 0, 1, 2, 4]), "€\u{fffd}\u{fffd}a€€a");
    assert_eq!(streamed(&[0, 1, 4, 3, 4]), "\u{fffd}\u{fffd}a\u{fffd}a");
}

#[test]
fn hostile_files_are_errors_that_name_them() {
    let good = std::fs::read(model("llama_gqa").join("tokenizer.json")).unwrap();
    let parsed: Value = serde_json::from_slice(&good).unwrap();
    let changed = |change: &dyn Fn(&mut Value)| {
        let mut value = parsed.clone();
        change(&mut value);
        value.to_string().into_bytes()
    };
    for bytes in [
        b"".to_vec(),
        b"{}".to_vec(),
        b"[1, 2".to_vec(),
        "[".repeat(100_000).into_bytes(),
        good[..good.len() / 2].to_vec(),
        changed(&|value| value["model"]["type"] = json!("Sorcery")),
        changed(&|value| value["model"]["vocab"]["x"] = json!(-4)),
        changed(&|value| value["model"]["merges"][0] = json!("no such merge")),
        changed(&|value| {
            value["pre_tokenizer"] =
                json!({"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": false});
        }),
    ] {
        let files = TextFiles { tokenizer: bytes.clone(), ..TextFiles::default() };
        let error = Tokenizer::new(&files).unwrap_err();
        assert_eq!(error.kind(), Some(&ErrorKind::Damaged), "{error}");
        assert!(error.to_string().starts_with("invalid tokenizer"), "{error}");
    }
    // a post-processor that adds a token which does not exist
    let template = json!({
        "type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "[NONE]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}], "special_tokens": {}
    });
    let files =
        TextFiles { tokenizer: changed(&|value| value["post_processor"] = template.clone()), ..TextFiles::default() };
    let outcome = Tokenizer::new(&files).and_then(|tokenizer| tokenizer.encode("a"));
    assert!(outcome.is_err());
    let error = Tokenizer::from_dir("/no/such/directory").unwrap_err();
    assert!(error.to_string().contains("/no/such/directory/tokenizer.json"), "{error}");
}
