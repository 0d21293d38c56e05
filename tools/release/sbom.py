"""The software bill of materials: which files the build has, what of others is in them, which GPUs they hold code for.

    python -m release.sbom --build build --output build/sbom.cdx.json        (in tools/)

CycloneDX 1.6, JSON. `make wheel` puts it into the wheel (.dist-info/sboms/, PEP 770), `make release` beside it.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import importlib.metadata
import pathlib
import re
import sys
import uuid

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL

from .facts import Commit, Paths, ReleaseError, elf_machine, head, version
from .parts import Part, parts

NAMESPACE = uuid.uuid5(uuid.NAMESPACE_DNS, "github.com/deepep-go/deepep")
# The flags that each GPU library was compiled with, as make keeps them in the build folder.
FLAGS = {
    "libdeepep_cuda.so": "obj/cuda.flags",
    "libdeepep_cuda12.so": "cuda12/obj/cuda.flags",
    "libdeepep_nvshmem.so": "obj/nvshmem.flags",
}


def machine_codes(build: pathlib.Path, library: str) -> list[str]:
    """The codes in a GPU library: sm_90 is machine code, compute_90 PTX. Empty for a library without GPU code."""
    if library not in FLAGS:
        return []
    flags = (build / FLAGS[library]).read_text()
    codes = re.findall(r"-gencode arch=\S+,code=(\S+)", flags)
    if not codes:
        raise ReleaseError(f"{library}: build/{FLAGS[library]} names no -gencode")
    return list(dict.fromkeys(codes))


def our_files(paths: Paths) -> list[Component]:
    """The libraries and the program, each with its hash, machine and GPU codes."""
    found = [paths.library, *paths.kernel_libraries(), *sorted((paths.build / "lib").glob("*.abi3.so")), paths.program]
    components = []
    for path in found:
        properties = [Property(name="deepep:machine", value=elf_machine(path))]
        properties += [Property(name="deepep:gpu_code", value=code) for code in machine_codes(paths.build, path.name)]
        kind = ComponentType.APPLICATION if path == paths.program else ComponentType.LIBRARY
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        components.append(
            Component(
                name=path.name,
                version=version(),
                type=kind,
                bom_ref=f"file:{path.name}",
                licenses=[LicenseFactory().make_from_string("MIT")],
                hashes=[HashType(alg=HashAlgorithm.SHA_256, content=digest)],
                properties=properties,
            )
        )
    return components


def component_of(part: Part) -> Component:
    properties = [Property(name="deepep:go.sum", value=part.sums)] if part.sums else []
    return Component(
        name=part.name,
        version=part.version,
        type=ComponentType.LIBRARY,
        bom_ref=str(part.purl),
        purl=part.purl,
        licenses=[LicenseFactory().make_from_string(part.licence)],
        properties=properties,
    )


def make_sbom(paths: Paths, commit: Commit, found: list[Part]) -> str:
    """The SBOM of a build as JSON text.

    Raises:
        ReleaseError: the text does not agree with CycloneDX's schema.
    """
    bom = Bom()
    bom.metadata.timestamp = datetime.datetime.fromtimestamp(commit.epoch, datetime.timezone.utc)
    generator = "cyclonedx-python-lib"
    bom.metadata.tools.components.add(
        Component(name=generator, version=importlib.metadata.version(generator), type=ComponentType.LIBRARY)
    )
    product = Component(
        name="deepep-go",
        version=version(),
        type=ComponentType.LIBRARY,
        bom_ref="deepep-go",
        purl=PackageURL("pypi", None, "deepep-go", version()),
        licenses=[LicenseFactory().make_from_string("MIT")],
        properties=[Property(name="deepep:commit", value=commit.name)] if commit.name else [],
    )
    bom.metadata.component = product
    files = our_files(paths)
    others = [component_of(part) for part in found]
    bom.components.update(files, others)
    bom.register_dependency(product, files)
    for file in files:
        bom.register_dependency(
            file, [other for part, other in zip(found, others, strict=True) if file.name in part.files]
        )
    hashes = "".join(file.name + next(iter(file.hashes)).content for file in files)
    bom.serial_number = uuid.uuid5(NAMESPACE, commit.name + hashes)
    text: str = JsonV1Dot6(bom).output_as_string(indent=2)
    check(text)
    return text + "\n"


def check(text: str) -> None:
    """Compares an SBOM with CycloneDX's schema."""
    if problem := JsonStrictValidator(SchemaVersion.V1_6).validate_str(text):
        raise ReleaseError(f"the SBOM does not agree with CycloneDX's schema: {problem}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the SBOM of a build.")
    parser.add_argument("--build", type=pathlib.Path, required=True)
    parser.add_argument("--output", type=pathlib.Path, required=True)
    options = parser.parse_args()
    paths = Paths(options.build.resolve(), pathlib.Path())
    options.output.write_text(make_sbom(paths, head(), parts(paths)))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ReleaseError as error:
        sys.exit(f"sbom: {error}")
