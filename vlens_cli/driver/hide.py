import sys
def hide_broken_packages():
    for n in ("torchvision","torchaudio","torchcodec"): sys.modules[n]=None
