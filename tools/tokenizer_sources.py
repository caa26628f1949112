"""What `tools/fetch_tokenizers.py` fetches: pinned packages, the files in them, and what each file must hash to."""

from __future__ import annotations

from typing import NamedTuple


class SourceFile(NamedTuple):
    """A file inside a wheel."""

    path: str
    """Inside the wheel."""
    name: str
    """As what it is kept: `family/file`."""
    sha256: str


class Package(NamedTuple):
    """A wheel that carries tokenizers."""

    requirement: str
    wheel: str
    sha256: str
    licence: str
    """Licence of the tokenizer files, as far as the package declares one."""
    source: str
    """Whose tokenizers they are."""
    files: tuple[SourceFile, ...]


class Split(NamedTuple):
    """Where the split rule of a family of ranks stands; it is written beside the ranks as `tiktoken_config.json`."""

    family: str
    constant: str
    """Name of the constant in `rule.py`, or of one of tiktoken's encodings."""
    special_tokens: dict[str, int]
    """Those that the tests use; empty for tiktoken's own encodings, which bring theirs."""


PACKAGES = (
    Package(
        requirement="litellm==1.110.2",
        wheel="litellm-1.110.2-cp310-abi3-manylinux_2_28_x86_64.whl",
        sha256="9d94d1c7d524b6fd10c14f9c8c6c4f0ac31705f9964ac59dcfd8337c046d8917",
        licence="MIT (the package; DeepSeek's file: MIT, its notice is kept beside it)",
        source="OpenAI's ranks as tiktoken caches them, DeepSeek V3, Anthropic's older file",
        files=(
            SourceFile(
                "litellm/litellm_core_utils/tokenizers/9b5ad71b2ce5302211f9c61530b329a4922fc6a4",
                "cl100k/ranks.tiktoken",
                "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7",
            ),
            SourceFile(
                "litellm/litellm_core_utils/tokenizers/fb374d419588a4632f3f557e76b4b70aebbca790",
                "o200k/ranks.tiktoken",
                "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d",
            ),
            SourceFile(
                "litellm/litellm_core_utils/tokenizers/ec7223a39ce59f226a68acc30dc1af2788490e15",
                "p50k/ranks.tiktoken",
                "94b5ca7dff4d00767bc256fdd1b27e5b17361d7b8a5f968547f9f23eb70d2069",
            ),
            SourceFile(
                "litellm/litellm_core_utils/tokenizers/deepseek_tokenizer.json",
                "deepseek-v3/tokenizer.json",
                "4607b3d1929c5ca263a81d7153c6d6ecdbc71c9e933c0fb2df2abf181bf6df61",
            ),
            SourceFile(
                "litellm/litellm_core_utils/tokenizers/deepseek_tokenizer_LICENSE",
                "deepseek-v3/LICENSE",
                "f2c6c602815669d292889e5be8c802f2ed950653b77999b1584e8e6aed25d040",
            ),
            SourceFile(
                "litellm/litellm_core_utils/tokenizers/anthropic_tokenizer.json",
                "anthropic/tokenizer.json",
                "c241737df24b4e7f7c9af4fdcee29a0ca903dcb288a8b753bc346a3092911767",
            ),
        ),
    ),
    Package(
        requirement="dashscope==2.0.2",
        wheel="dashscope-2.0.2-py3-none-any.whl",
        sha256="0602d1800f7433bdb7953560986eaf5146454ed3988636c0a91963ba24e74258",
        licence="Apache-2.0",
        source="Qwen, Alibaba Cloud",
        files=(
            SourceFile(
                "dashscope/resources/qwen.tiktoken",
                "qwen/ranks.tiktoken",
                "b2b1b8dfb5cc5f024bafc373121c6aba3f66f9a5a0269e243470a1de16a33186",
            ),
            SourceFile(
                "dashscope/tokenizers/qwen_tokenizer.py",
                "qwen/rule.py",
                "a0ee3d948526834e906354652506719a08d2c266de056fa532195ae7705fa3f5",
            ),
        ),
    ),
    Package(
        requirement="mistral-common==1.13.1",
        wheel="mistral_common-1.13.1-py3-none-any.whl",
        sha256="98b4d0755b8d90bf4691fa8f1b70cb3b4a8cd4dc1653c4ed08ef3d1c7d2c29af",
        licence="Apache-2.0",
        source="Mistral AI",
        files=(
            SourceFile(
                "mistral_common/data/tokenizer.model.v1",
                "mistral-v1/tokenizer.model",
                "dadfd56d766715c61d2ef780a525ab43b8e6da4de6865bda3d95fdef5e134055",
            ),
            SourceFile(
                "mistral_common/data/mistral_instruct_tokenizer_240216.model.v2",
                "mistral-v2/tokenizer.model",
                "37f00374dea48658ee8f5d0f21895b9bc55cb0103939607c8185bfd1c6ca1f89",
            ),
            SourceFile(
                "mistral_common/data/mistral_instruct_tokenizer_240323.model.v3",
                "mistral-v3/tokenizer.model",
                "9addc8bdce5988448ae81b729336f43a81262160ae8da760674badab9d4c7d33",
            ),
            SourceFile(
                "mistral_common/data/mistral_instruct_tokenizer_241114.model.v7",
                "mistral-v7/tokenizer.model",
                "1b968b8dc352f42192367337c78ccc61e1eaddc6d641a579372d4f20694beb7a",
            ),
            SourceFile(
                "mistral_common/data/tekken_240911.json",
                "tekken/tekken.json",
                "1948e2d48b0e7377f1bb5f1210f1ae5f984934e75713fc07e2452729b8365316",
            ),
        ),
    ),
    Package(
        requirement="llama-models==0.3.0",
        wheel="llama_models-0.3.0-py3-none-any.whl",
        sha256="7f77f78ff13fca09f70d76a376aff6414cd901623fb9d57e69c2f8367a73032f",
        licence="Meta's Llama community licences: for measuring on this machine, not to be passed on",
        source="Llama 3 and Llama 4, Meta",
        files=(
            SourceFile(
                "llama_models/llama3/tokenizer.model",
                "llama3/ranks.tiktoken",
                "82e9d31979e92ab929cd544440f129d9ecd797b69e327f80f17e1c50d5551b55",
            ),
            SourceFile(
                "llama_models/llama3/tokenizer.py",
                "llama3/rule.py",
                "03651bf842642adf7ae2fcb5afe4cd211c7fdb23180babc42a9c635d4bc8fc11",
            ),
            SourceFile(
                "llama_models/llama4/tokenizer.model",
                "llama4/ranks.tiktoken",
                "d0bdbaf59b0762c8c807617e2d8ea51420eb1b1de266df2495be755c8e0ed6ed",
            ),
            SourceFile(
                "llama_models/llama4/tokenizer.py",
                "llama4/rule.py",
                "606f0473436ebd847589149d7bb1b6761a85269c4b846767b813183ed5cd5795",
            ),
        ),
    ),
    Package(
        requirement="seqio==0.0.20",
        wheel="seqio-0.0.20-py2.py3-none-any.whl",
        sha256="0b57ca3048a707d14504842b151edafc2b1c684df52aeb06672cfe166db9000d",
        licence="Apache-2.0",
        source="a small unigram model for the tests of T5's library, Google",
        files=(
            SourceFile(
                "seqio/test_data/sentencepiece/sentencepiece.model",
                "t5-small-test/spm.model",
                "338e16e8d003229e0ccbb9db45b7daab1abe5236a81a1e533305b7a747d895ec",
            ),
        ),
    ),
)

SPLITS = (
    Split("cl100k", "cl100k_base", {}),
    Split("o200k", "o200k_base", {}),
    Split("p50k", "p50k_base", {}),
    Split("qwen", "PAT_STR", {"<|endoftext|>": 151643, "<|im_start|>": 151644, "<|im_end|>": 151645}),
    Split("llama3", "pat_str", {"<|begin_of_text|>": 128000, "<|end_of_text|>": 128001}),
    Split("llama4", "O200K_PATTERN", {"<|begin_of_text|>": 200000, "<|end_of_text|>": 200001}),
)

REFERENCES = {
    "tiktoken==0.14.0": (
        "cd8ca1305c1c902fe42c486165f2e4808d9997625c98ffb05b9e0366d99d3948",
        "1f83081065ee5833d35b49e9180f3d8d15622a603dd1c435da0da6cc12b3662f",
        "f5e7665f6624e052e5e7f6a36919ab69279decdc976d7b16b4fa15e1897d0513",
        "d6cebe67765569df3dafac8474e4eccf5c19d24140492567a5e58a11445732a4",
        "7db45b98e94adf4173a5cd7422b150999a7ee11ff847783a14f6e1b80cc38cb6",
        "7896eea257fe497a2b7134474d909156c6744ce8da35bce88011a960e008aa0d",
        "cbe2cc3bba939bcdaf103e03df9d5039d33887080b315624be28ec69059e5f94",
        "2157f52e4b4d7ac5ecc7457b3716834706e7ef9a46f5144029bfeb7cf71f4e06",
        "26e60f6a956ee171ab728b37b8439905d7ea1db435c30f9822f291e9861c861d",
    ),
    "regex==2025.11.3": (
        "d8b4a27eebd684319bdf473d39f1d79eed36bf2cd34bd4465cdb4618d82b3d56",
        "5cf77eac15bd264986c4a2c63353212c095b40f3affb2bc6b4ef80c4776c1a28",
        "cfe6d3f0c9e3b7e8c0c694b24d25e677776f5ca26dce46fd6b0489f9c8339391",
        "3b30bc921d50365775c09a7ed446359e5c0179e9e2512beec4a60cbcef6ddd50",
        "f99be08cfead2020c7ca6e396c13543baea32343b7a9a5780c462e323bd8872f",
        "10483eefbfb0adb18ee9474498c9a32fcf4e594fbca0543bb94c48bac6183e2e",
        "3a91e4a29938bc1a082cc28fdea44be420bf2bebe2665343029723892eb073e1",
        "08b884f4226602ad40c5d55f52bf91a9df30f513864e0054bad40c0e9cf1afb7",
        "a12ab1f5c29b4e93db518f5e3872116b7e9b1646c9f9f426f777b50d44a09e8c",
        "04d2765516395cf7dda331a244a3282c0f5ae96075f728629287dfa6f76ba70a",
        "5d9903ca42bfeec4cebedba8022a7c97ad2aab22e09573ce9976ba01b65e4361",
        "4aecb6f461316adf9f1f0f6a4a1a3d79e045f9b71ec76055a791affa3b285850",
    ),
    "sentencepiece==0.2.3": (
        "6b94ccd8554338970e1d73959a7e3ed4d110a60dab95d459990b30a508fa0998",
        "855b047e02fb9c7aae2f673f5c1adbd42a4a0e8ce77e5090d14ff26f9282749d",
        "141dc0bef1e28a5cf7e41c8354ad6cc14525758278045286dcb5429b9906d39f",
        "9b39b16b889c9d3be4f00f1a0a4283ee81ad8af745d48023e5ab18c724019c08",
        "a6b735a8027b998c163e540fdde66ac0bb95fc471f6f4165c8df35fb45385116",
        "cc3189b79c1ffda767f71b04238c27ac746f3b7abc263eab9a41c4cf46aee49e",
        "80fe42d6ecd3860ee43327de31687f222af8e93f7d66e248d241cf9a0466eb73",
        "dfc31f9f133a2712d396efa94d666c2ad83d5611ce34f11339429c6831253014",
        "4d82f2a0f704f5d0cf027bc8cc5ad49e23c11a9cc0b5bd08ca51985917963bf5",
    ),
}
"""Libraries whose ids count, and the hashes of their wheels (CPython to 3.13; Linux on x86-64 and ARM, macOS on ARM).
Hugging Face's `tokenizers` is already there, for the other tests."""
